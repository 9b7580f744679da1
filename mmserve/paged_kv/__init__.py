"""The books of the KV cache: which block belongs to whom, and which blocks hold what.  The bytes are in the workers."""
