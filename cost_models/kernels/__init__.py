"""Time of operations."""
