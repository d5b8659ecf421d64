"""What compiling for a TPU takes besides: a description of an absent one, options, refusals.

May import `xla.platform` and what `xla` may.
"""
