"""The step as jax equations. Only `compat` uses jax's internals.

May import the types of `planning` and `hardware`.
"""
