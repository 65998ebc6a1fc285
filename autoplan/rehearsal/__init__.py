"""Rehearsal: chosen ranks of a program of any size run in this process, without weights, beside their plan.

`rehearse`: the door, `autoplan.rehearse(plan, ranks)`.
`rank`: runs one rank: fake tensors, a fake process group of the whole world, the runtime's own code.
`watch`: live bytes, arithmetic and collectives of what runs.
`expected`: what the plan, its ledger and its price say of the same rank.
`compare`: the two side by side, and the first difference.
`command`: `autoplan rehearse`.
"""
