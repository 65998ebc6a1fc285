"""Cut a trace into blocks and calls.

`assemble`: layers, the glue around them, and parameter-free tables.
"""
