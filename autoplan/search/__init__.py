"""Search: choose a Plan for a ModelGraph on a Cluster."""
