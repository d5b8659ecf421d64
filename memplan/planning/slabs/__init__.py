"""A program in slabs: its graph with an axis, the loops over slabs, their costs, and the choice among them.

May import `planning`.
"""
