"""Cost models: what a model costs on a cluster under a parallel layout. Never imports torch."""

# A second copy under the bare name would have its own classes, and isinstance would fail between the two.
if __name__ == "cost_models":
    raise ImportError("the cost models are imported as autoplan.cost_models, not as cost_models")
