"""From media bytes to embedding rows: headers, killable decoding, micro-batches, two tiers of cache, and a pool that joins them.

Knows nothing of schedulers and sequences.  The towers themselves live in the worker processes.
"""
