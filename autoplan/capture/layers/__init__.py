"""Cut a trace into blocks and calls."""
