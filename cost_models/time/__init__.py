"""Time of a step."""
