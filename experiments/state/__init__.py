"""State: checkpoints under other plans, and models that are larger than one process."""
