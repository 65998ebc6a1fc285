"""Codegen: lower a Plan to a ProgramSpec and one readable Python module per pipeline stage.

`program`: assembles stages, ProgramSpec and ledger.
`emit`: emits the source text of blocks.
`check`: type-checks an emitted program.
`whole_sizes`: local sizes that only some batches make whole.
`schedules`: the ScheduleSpec of a pipeline schedule.
"""
