"""Devices, links, levels and clusters, from the catalog, a file or words; what is known of communication libraries."""
