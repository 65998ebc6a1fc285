"""Verify: a captured graph is run in this process and compared with the module it was captured from.

`check`: the comparison.
`cost`: seconds and memory of a verification, estimated from the graph.
`door`: whether and how a capture is verified, and the line that the plan gets.
`drawn`: the random numbers that module and graph both draw.
`first`: name the first value that differs.
`one_device`: the program of one device.
`runs`: losses and gradients of the module and of the graph.
`sample`: sizes and batches to compare on.
`shallow`: compare fewer layers where the whole model costs too much.
`wide`: float64 arithmetic for code of another dtype.
"""
