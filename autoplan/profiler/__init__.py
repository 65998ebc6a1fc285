"""Measure operations, collectives and fixed costs of the machine at hand; the result is an `autoplan` Profile.

`clocks`: clocks, power and other processes of the devices.
`command`: the command `autoplan profile`, also under torchrun.
`interference`: a collective beside a product.
`job`: what the ranks agree on: when to stop, and whose time counts.
`lattice`: general shapes, from which those of any model are interpolated.
`links`: collectives, and links that several groups share.
`machine`: what a profile records about its machines.
`nodes`: the nodes of a job's ranks.
`ops`: one operation, as it runs in a training step.
`overheads`: fixed costs of a step beside its operations and collectives.
`processes`: local processes in one group, for this and for experiments.
`proposal`: a cluster file for this machine.
`run`: what is measured, and in which order.
`show`: a profile as tables.
`small_programs`: programs to measure fixed costs with.
`system`: commands and kernel files of the machine.
`tasks`: the operations of a model as measuring tasks.
`topology`: devices, links between them, NUMA nodes, network cards.

What was tested: everything runs on CPUs with gloo, two nodes included (two agents of torchrun on one machine). One
machine cannot show that network cards are really shared, or that a slower node is found. A CPU cannot run the parts for
CUDA (events, the L2 cache, streams, nvidia-smi): they follow the documents, and their parsers and the timer's logic are
tested on texts and on a simulated device. A profile of one process has no collectives, and a profile of one node has
nothing that crosses nodes; its notes say so.
"""
