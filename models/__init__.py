"""A zoo of realistic Flax networks, one file each, with whole training steps in `models.train`.

Nothing here depends on memplan: the networks are ordinary user code.
"""
