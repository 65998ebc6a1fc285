"""`make demo`: measure, plan, train on local processes, compare with one process."""
