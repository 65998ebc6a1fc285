"""Cost models: the time and memory of a model on a cluster under a parallel layout. Never imports torch.

`work`: the operations, collectives, parameters and activations of one rank, as plain data.
`costs`: the cost of one operation, collective or copy; what the search and `time.price` ask.
`profile`: measurements of one kind of machine. `json_fields`: reading JSON with errors that name the field.
`constants`: global constants that only whole training steps show.
`quantity`: a number with an interval and its evidence.
`whole_run`: days, money and energy of a whole training run.
`hardware`: devices, links and clusters.
`kernels`: the time of operations.
`network`: the time of collectives.
`memory`: the memory of every pipeline rank; the recompute frontier.
`time`: the time of a step.
"""

# A second copy under the bare name would have classes of its own, and isinstance would fail between the two.
if __name__ == "cost_models":
    raise ImportError("the cost models are imported as autoplan.cost_models, not as cost_models")
