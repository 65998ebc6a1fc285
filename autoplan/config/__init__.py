"""What can be chosen of a configuration and of a run."""
