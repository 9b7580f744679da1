"""Who computes what next on one replica.  Pure: no torch, no asyncio, no clock; it does not know what an image is."""
