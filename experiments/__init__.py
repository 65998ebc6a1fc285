"""Experiments: each claim of the README has a command here, run from the root of the repository as a module:

    python -m experiments.by_hand.composed --quick

README.md beside this file is the index, README.md in every folder has the commands with their last figures.
"""
