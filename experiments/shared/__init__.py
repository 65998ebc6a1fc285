"""What the experiments share: models, timing, processes that train side by side, and how results are shown."""
