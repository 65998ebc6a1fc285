"""The graph of a model, sizes and layouts as plain data."""
