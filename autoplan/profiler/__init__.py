"""Measure operations, collectives and fixed costs of the machine at hand; the result is an `autoplan` Profile.

Read `run` (what is measured when), then `ops` (one operation), `links` (collectives, shared links), `overheads` and
`interference` (what a step adds), `machine` with `topology`, `clocks` and `nodes` (where it was measured), `command`
(the command line, also under torchrun) and `proposal` (a cluster file of what was found).

What was shown, and what was not: everything runs on CPUs with gloo, two nodes included (two agents of torchrun on one
machine). One machine cannot show that cards are really shared or that a slower node is found; a CPU cannot show the
parts for CUDA (events, the L2 cache, streams, nvidia-smi): those are written from the documents, and their parsers and
the timer's logic are tested on texts and on a simulated device. A profile of one process has no collectives, one of one
node nothing that crosses nodes; its notes say so.
"""
