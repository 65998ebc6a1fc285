"""Time of collectives."""
