"""Trace the model: everything around torch.export.

`cache`: captured graphs on disk.
`config_file`: build the model of a Hugging Face config.json.
`experts`: the experts of a mixture as one op.
`host`: a model on an accelerator, captured as if it were on the host.
`huggingface`: Hugging Face models, with attention as one op.
`inplace`: in-place ops as ops that make new tensors.
`inputs`: model, example batch and loss as one module.
`layer_tracer`: find the repeated layers and delimit them in the trace.
`left_out`: dropout inside attention, refused or left out.
`lengths`: which inputs are sequences, and of which length.
`masks`: the masks of Hugging Face models.
`recurrences`: refuse layers that go along the sequence step by step.
`sizes`: export with symbolic sizes.
`windows`: attention with windows, documents or a bias, as one op each.
"""
