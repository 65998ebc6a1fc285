"""Many plans at once: what-if over hardware and task, and the capacity table of models on clusters.

`whatif`: the best plan at every point of a sweep.
`capacity`: the capacity table, every model on every cluster.
`label`: a plan, and the evidence behind its price, in one line.
"""
