"""Versions of torch and classes of transformers that were tried."""
