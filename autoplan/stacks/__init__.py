"""Training stacks (Megatron-LM, NeMo, torchtitan, DeepSpeed ...): what each does by default, and what it can do.

`records`: the records (profiles/stacks), by version; everything else reads them there.
`like`: the settings of a stack for a run, and what was given against them (`--like`).
`defaults`: defaults of the frameworks that published rows name; how to read the words of rows.
`options`: attention kernels, launch and overlap of published rows, changed by the words of their flags.
"""
