"""From a flat trace to blocks and calls."""
