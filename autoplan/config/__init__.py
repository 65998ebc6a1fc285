"""Configurations: the choices of a plan and of a run, their values, and how they are written and read.

`parallel`: `ParallelConfig`, the degrees and settings of a plan.
`run_options`: `RunOptions`, the setup of a run. `kernels`: its words, and `Mode`. `precision`: `Precision`.
`mesh`: the device grid of a configuration: its axes, groups and communicators.
`choice`: `Choice`, the record of one choice.
`choices`: reading and writing choices as data, command-line words and labels.
`settings`: the settings of a task beside its plan: lengths, batch, precision, mode, profile.
`pins`: `Pins`, the choices that the user fixed.
`recompute`: the kinds of recompute and how they are written.
`offload`: the kinds of data that can be offloaded to the host.
`context_methods`: the methods of context parallelism.
`keys`: checked keys of mappings.
`numbers`: reading numbers that people write, and formatting numbers for people.
"""
