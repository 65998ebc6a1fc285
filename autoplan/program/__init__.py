"""From a graph and its layouts to statements, and their work, collectives and activation memory.

`pins`: fills in pins by defaults instead of a search, and cuts stages of balanced arithmetic.
`facts`: facts of model, cluster and run that decide which configurations are legal.
`legality`: the rules of legal configurations (a sub-room).
`context_pins`: context-parallel methods by block.
`parallel_dims`: the device grid of a model under a configuration.
`expert_degrees`: the degrees over which experts are spread.
`problem`: the intra-op problem as data: choices, options, conversions.
`token_dispatch_layouts`, `with_sequence_parallel`, `without_sequence_parallel`, `whole_losses`: restrictions of it.
`statements`: statements of a lowered block, with their collectives.
`lower`: lowers blocks to statements under chosen layouts.
`passes`: passes over statements for features that layouts do not express.
`context_parallel`, `token_dispatch`: the passes of attention over cut sequences and of experts.
`op_costs`: work of single operations on one rank.
`fusion`: memory traffic of element-wise operations that share a kernel.
`workload`: the work of one rank under a solved layout.
`regions`: statements that are recomputed together.
`megatron_kernels`, `megatron_modules`: saved bytes and recompute modules of hand-written kernels.
`activations`, `activation_bytes`: activation memory of blocks, and of their calls together.
`gradients`: bytes alive while gradients flow back.
`stored_tensors`: tensors as storages and strides.
`unit_memory`, `shared_values`: activation memory of pipeline units, and values that several units share.
"""
