"""A program in slabs: its graph with an axis, loops over slabs, their costs, and the choice.

May import `planning`.
"""
