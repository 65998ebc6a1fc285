"""Calibration: the cost model's global constants from measured training steps.

`command`: the command `autoplan calibrate`.
`fit`: the fit itself, on plain numbers.
`steps`: a user's own steps from a file, and their prices at other constants.
`tables`: fitted constants as tables and as the data of a file.
"""
