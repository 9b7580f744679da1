"""The simulated device: workers that answer plans after the time a GPU would take.  No torch; everything around them is real."""
