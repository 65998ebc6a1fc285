"""Reports: plans, estimates and what-ifs as text for people and as versioned JSON. No torch.

`answers`: the commands plan, estimate, whatif and capacity.
`arguments`: read the text arguments of the command line.
`capacity`: the capacity table as text and JSON.
`catalogs`: listings of models and hardware.
`check`: the input of another framework, checked.
`commands`: command lines that a report proposes.
`data`: reports as JSON.
`degrees`: the configuration for given degrees.
`drawn`, `drawn_sweeps`: what a report in HTML draws beside the JSON answer.
`files`: files that commands write.
`flags`: arguments and options that several commands share.
`html`: `--report FILE`.
`plots`: plots in the terminal.
`output`: standard output, whose loss is an error.
`request`: the options of a command as a PlanRequest.
`screen`: the first screen of `autoplan plan`.
`stacks`: listings of the stacks of `--like`.
`tables`: tables that fit the width of the terminal.
`text`: reports as text.
`timeline`: the predicted step as Chrome trace events.
`words`: choices in words.
`waiting`: the status line on stderr.
"""
