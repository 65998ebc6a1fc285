"""The time of collectives.

`collectives`: bytes and seconds of a collective over the levels of a cluster.
"""
