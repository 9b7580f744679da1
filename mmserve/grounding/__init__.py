"""What an answer says is there, held against what the vision side saw, and how either changes over time.  Pure: no clock, no loop."""
