"""jax: the step as equations. `compat` alone touches what jax keeps to itself.

May import the types of `planning` and `hardware`.
"""
