"""Search: choose a Plan for a ModelGraph on a Cluster.

`planner`: the search over degrees, layouts and cuts, with its certificate.
`space`: the space of degrees of a task.
`degrees`: enumerates legal degrees under pins.
`layouts`: the request for a plan, and the layouts of its candidates.
`intra`: solves the layouts inside blocks as an integer program.
`linear`: hands integer programs to the solver.
`quick_time`, `quick_memory`: bounds that need no layout.
`cuts`: pipeline cuts and recompute of one candidate, exact.
`windows`: seconds of every range of units on every stage, which cuts are searched in.
`interleaved_cuts`: cuts of candidates with several stages per rank or a split backward.
`estimate`: prices one given configuration.
`infeasible`: explains why no plan fits the memory.
`refusals`: explains why pins leave no legal plan.
`nearest`: finds the nearest legal choices.
"""
