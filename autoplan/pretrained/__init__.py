"""Pretrained models: values from files or a model's own initialisation, tensor by tensor, and the way back into files.

`weights`: the values of a model, made when they are asked for
`export`: a trained model under the names of its `save_pretrained`
"""
