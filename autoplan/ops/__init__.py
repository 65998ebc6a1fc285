"""Rules: how each operator may be sharded, as tables."""
