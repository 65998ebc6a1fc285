"""Rewrite the trace before it is cut: means over the batch, losses of routers, casts."""
