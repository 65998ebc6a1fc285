"""Exporters: plans written as the input of other frameworks, and such inputs read back. One record per target."""
