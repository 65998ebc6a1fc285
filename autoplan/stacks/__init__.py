"""Training stacks (Megatron-LM, NeMo, torchtitan, DeepSpeed ...): what each does by default, and what it can do.

`records`: the records (profiles/stacks), by version; everything else reads them there.
`like`: the settings of a stack for a run, and what was given against them (`--like`).
"""
