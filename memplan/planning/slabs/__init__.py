"""A program in slabs: its graph with an axis through it, the loops over slabs, what they take, which are chosen.

May import `planning`.
"""
