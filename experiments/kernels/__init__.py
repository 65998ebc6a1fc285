"""Models of kernels and collectives against published timings, and their fit."""
