"""The time of a step.

`price`: `Pricer`, the time and memory of one plan.
`blocks`: the cost of one call of a block, by kind of work.
`states`: the cost of parameters: ZeRO's traffic, gradient accumulation, the optimizer.
`host`: the host's time to start kernels.
`simulation`: event simulation of a pipeline schedule.
`estimate`: `Estimate`, the price of a plan in parts.
"""
