"""The HTTP door: OpenAI's routes and our own over one engine, errors included.

`server.Gateway` listens and drains; `app` holds routes and the middleware; `*_api` turn bodies into ChatRequests; `deliver`, `answer` and
`sse` turn generations into bytes.  Of the engine it uses what `face` says.
"""
