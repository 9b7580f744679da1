"""What a card takes for a step or an encode, and how much it holds: the same arithmetic for simulated devices and for the planner."""
