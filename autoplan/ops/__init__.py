"""Operations: one record per op with everything known of it, and the rules by which ops may be sharded.

`record`: the type of a record, kinds and traits.
`table`: all records by op, and questions about them.
`elementwise`, `views`, `products`, `attention`, `norms`, `losses`, `routing`, `making`, `draws`: records by family.
`arguments`: how arguments of an ATen op become ops of the IR.
`language`: the one-line rule language of splits.
`labels`: rules whose labels depend on the arguments of an op.
`factors`: infers every dim of a model as a product of named factors.
`strategies`: all legal ways to run one op on the sub-axes.
`batch`: whether the batch or the sequence of a model can be split.
`saved`: rules of the bytes that an op keeps for its backward.
`strides`: strides of results, and so whether torch returns a view or a copy.
`text`: text of an op in an emitted program.
"""
