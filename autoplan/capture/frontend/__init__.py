"""Trace the model: everything around torch.export.

`inputs`: model, batch and loss as one module. `lengths`: which inputs are sequences. `sizes`: sizes as symbols.
`layer_tracer`: layers that are marked in the trace. `inplace`: in-place ops as ops that make new tensors.
`huggingface`, `masks`, `windows`: Hugging Face models, their masks and their attention.
`experts`, `recurrences`, `left_out`: experts as one op, loops that are refused, dropout that is left out.
`config_file`: models of a config.json. `host`: models on an accelerator. `cache`: captured graphs on disk.
"""
