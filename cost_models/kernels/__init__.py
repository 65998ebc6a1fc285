"""The time of operations.

`operations`: `op_s`, the time of one operation: measured, interpolated or from the roofline.
`gpu`: matrix products and attention on a GPU, from published timings.
"""
