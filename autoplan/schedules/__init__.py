"""Pipeline schedules: the actions of every rank in order, what they wait for, and how much they hold in memory.

`schedule`: SCHEDULES, a record per schedule; the action lists of a plan.
`orders`: the order of one rank's actions under each schedule.
`dependencies`: an order of the actions of all ranks in which every action comes after what it waits for.
`graph`: the actions as a graph, for explaining schedules that never finish.
"""
