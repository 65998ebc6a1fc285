"""PyTorch's own database of operations and modules against their captured programs."""
