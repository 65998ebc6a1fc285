"""A rank that fails at every point of a job, and who names it."""
