"""Groups of ranks, and the time of their collectives.

`collectives`: bytes and seconds of a collective over the levels of a cluster.
`groups`: the groups of ranks of a configuration.
"""
