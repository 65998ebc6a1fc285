"""Measures operations, collectives and fixed costs on the machine it runs on, into a Profile."""
