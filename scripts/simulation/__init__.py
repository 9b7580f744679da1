"""A box of simulated cards in virtual time: traffic, the box, and what is reported of it."""
