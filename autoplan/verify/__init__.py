"""Verify: a captured graph is run in this process and compared with the module it was captured from.

`door`: whether and how a capture is verified, and the line that the plan gets. `check`: the comparison.
`runs`: loss and gradients of the module and of the graph. `wide`: float64 arithmetic for code of another dtype.
`one_device`: the program of one device. `sample`: sizes and batches. `first`: the first value that differs.
`cost`: seconds and memory of a verification. `shallow`: fewer layers, where the whole model costs too much.
"""
