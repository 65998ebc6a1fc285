"""Programs of the planner beside what one writes by hand: the same training, and how long each takes."""
