"""Model code and weights.  Basement: runs in worker processes only."""
