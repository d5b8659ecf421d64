"""What compiling for a GPU takes besides: a description of an absent one, options, failures.

May import `xla.platform` and what `xla` may.
"""
