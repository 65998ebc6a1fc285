"""Plans and captures on this machine: how near predictions are, and what planning and running them cost."""
