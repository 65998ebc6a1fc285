"""Measure operations, collectives and fixed costs of the machine at hand; the result is an `autoplan` Profile.

`run`: what is measured, and in which order. `job`: what the ranks agree on. `ops`: one operation.
`tasks`, `lattice`: the operations of a model, and general shapes. `links`: collectives and shared links.
`overheads`, `small_programs`, `interference`: what a step adds to its operations and collectives.
`machine`, `topology`, `clocks`, `nodes`, `system`: the machine that is measured.
`command`, `show`, `proposal`: the command line (also under torchrun), tables, and a cluster file of the machine.

What was tested: everything runs on CPUs with gloo, two nodes included (two agents of torchrun on one machine). One
machine cannot show that network cards are really shared, or that a slower node is found. A CPU cannot run the parts for
CUDA (events, the L2 cache, streams, nvidia-smi): they follow the documents, and their parsers and the timer's logic are
tested on texts and on a simulated device. A profile of one process has no collectives, and a profile of one node has
nothing that crosses nodes; its notes say so.
"""
