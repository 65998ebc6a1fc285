"""Trace the model: everything around torch.export.

`alone`: run a model as in one process.
`buffers`: all tensors of a model that are not parameters.
`cache`: captured graphs on disk.
`config_file`: build the model of a Hugging Face config.json.
`experts`: the experts of a mixture as one op, or as plain ops.
`expert_loops`: experts that are modules in a loop.
`hidden`: parameters of repeated layers, kept from torch.export.
`hf_attention`: the attention function of Hugging Face models.
`host`: a model on an accelerator, captured as if it were on the host.
`huggingface`: Hugging Face models, with attention as one op.
`inplace`: in-place ops as ops that make new tensors.
`frames`: lines of the user's code in a stack of calls.
`inputs`: model, example batch and loss as one module.
`layer_tracer`: find the repeated layers and delimit them in the trace.
`lengths`: which inputs are sequences, and of which length.
`lengths_held`: sizes as polynomials, and the lengths that a graph holds for.
`marker`: operators that stand for what capture keeps whole.
`masks`: the masks of Hugging Face models.
`own_backward`: functions with a backward of their own, checked or refused.
`recurrences`: refuse layers that go along the sequence step by step.
`recurrent`: nn.LSTM, nn.GRU and nn.RNN as one op each; `packed`: of packed sequences.
`rehearsal`: a run on fake tensors that says what an export can expect.
`sizes`: export with symbolic sizes.
`windows`: attention with windows, documents or a bias, as one op each.
`written_out`: attention with dropout, in plain ops.
"""
