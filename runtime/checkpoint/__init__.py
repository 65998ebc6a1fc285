"""Checkpoints of a training, which go on under any other plan and number of ranks.

`door`: save and load
`contents`: what is saved, and how it is put back
`values`: nested Python values as JSON
`folders`: folders by step, complete or not there, and their damage
`storage`: where torch.distributed.checkpoint writes and reads
"""
