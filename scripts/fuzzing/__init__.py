"""Inputs for the four doors that take bytes from outside, and what must hold for each: see `scripts.fuzz`."""
