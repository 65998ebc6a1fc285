"""Runtime: what every rank needs to run a ProgramSpec. Knows neither the planner nor the cost models."""

# A second copy under the bare name would have its own classes, and isinstance would fail between the two.
if __name__ == "runtime":
    raise ImportError("the runtime is imported as autoplan.runtime, not as runtime")
