"""Codegen: lower a Plan to a ProgramSpec and one readable Python module per pipeline stage."""
