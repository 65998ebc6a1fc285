"""Calibration: the cost model's global constants from measured training steps.

`fit`: the fit itself, on plain numbers. `steps`: a user's own steps from a file, and what they cost at other constants.
"""
