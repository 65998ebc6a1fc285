"""Many plans at once: what-if over hardware and task, and the capacity table of models on clusters."""
