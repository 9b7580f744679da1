"""Open-loop load on any OpenAI-compatible server: what arrives when, what it says, how it was answered, and the figures.

    traffic     when each request arrives and what it carries, drawn from a seed before the clock starts
    content     words, pictures and clips for it, and the request body
    client      sends on time, reads the stream with a stopwatch
    statistics  outcomes -> the result, under vLLM's names
    report      the result as text
    session     one run from traffic to result; `isolation` is two

Knows nothing of the engine: whatever it learns comes over HTTP, so that other servers are measured the same way.
"""
