"""Verify: a captured graph is run in this process and compared with the module it was captured from."""
