"""A zoo of realistic networks in Flax, one file each, with whole training steps in `models.train`.

Nothing here knows of memplan: the networks are ordinary user code for it to plan.
"""
