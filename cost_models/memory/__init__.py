"""Memory of every rank."""
