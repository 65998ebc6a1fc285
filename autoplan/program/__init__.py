"""From a graph and its layouts to statements, and what they compute, send and keep."""
