"""Reports: plans, estimates and what-ifs as text for people and as versioned JSON. No torch.

`text`, `capacity`, `catalogs`: text and tables. `data`: JSON. `timeline`: a step as Chrome trace events.
`arguments`, `degrees`, `flags`, `request`: what is typed on the command line. `commands`: command lines to propose.
`files`, `output`, `waiting`: files, standard output, and the status line.
"""
