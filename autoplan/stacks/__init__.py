"""Training stacks (Megatron-LM, NeMo, torchtitan, DeepSpeed ...): the defaults of each framework.

`defaults`: precision of gradients, ZeRO stages, recompute, schedules, vocabularies; how to read the words of rows and
flags.
`options`: attention kernels, launch and overlap, by year of the release.
"""
