"""Random combinations of plan, model and training loop, on real processes: the package's command says what."""
