"""Training stacks (Megatron-LM, NeMo, torchtitan, DeepSpeed ...): what each does where nobody says otherwise.

`defaults`: precision of gradients, ZeRO stages, recompute, schedules, vocabularies, and how their words are read.
`options`: kernels, launch and overlap, by year of the release.
"""
