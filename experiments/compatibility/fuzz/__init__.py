"""Random programs against PyTorch: what is captured and split computes what the module computes, or is refused."""
