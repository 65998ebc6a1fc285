"""Plans: the decisions of a search as plain data, how they are written and read, and the programs made from them.

`record`: the Plan, its JSON text, and its reading.
`document`: the sections of that text, which `autoplan plan --json` prints too.
`shapes`: the kinds of the values in it.
`layouts`: the layouts of a plan that was written down, found again in a graph.
`differences`: what a graph has that another one has not, in words.
`folder`: a program for the whole cluster in a folder, and the checks before it runs.
"""
