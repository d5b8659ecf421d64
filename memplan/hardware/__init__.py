"""Machines: devices, links, topologies, and the time that work takes on them. Knows no jax.

May import `errors`, `io` and `units`.
"""
