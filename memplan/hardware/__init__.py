"""What machines are: devices, links, topologies, and what work takes on them. The ground: knows no jax.

May import `errors`, `io` and `units`.
"""
