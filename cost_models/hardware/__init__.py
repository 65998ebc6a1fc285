"""Devices, links, clusters."""
