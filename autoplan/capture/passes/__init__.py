"""Passes that rewrite the trace before it is cut.

`batch_size`: means over the batch, computed micro-batch by micro-batch.
`cast`: the module in another dtype, before it is traced.
`coupled`: losses of routers, which couple all tokens.
`hoist`: sums over the layers, carried from layer to layer.
"""
