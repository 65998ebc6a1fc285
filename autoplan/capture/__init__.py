"""Capture: an nn.Module and an example batch become a ModelGraph."""
