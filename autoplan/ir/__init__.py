"""The graph of a model, sizes and layouts as plain data.

`graph`: ModelGraph, the torch-free form of a captured model.
`symbols`: symbolic sizes.
`layout`: mesh, layouts and conversions between them.
`dataflow`: questions about who makes and who reads values, and union-find.
"""
