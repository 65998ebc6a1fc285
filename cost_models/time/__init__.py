"""The time of a step.

`price`: `Pricer`, the seconds of one plan from the prices of its blocks.
`breakdown`: one plan in all parts.
`blocks`: the cost of one call of a block, by kind of work.
`states`: the cost of parameters: ZeRO's traffic, gradient accumulation, the optimizer.
`host`: the host's time to start kernels.
`simulation`: event simulation of a pipeline schedule.
`estimate`: `Estimate`, the result of `breakdown`.
"""
