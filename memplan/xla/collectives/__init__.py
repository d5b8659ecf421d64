"""Collectives of a module: their groups and seconds, and their rewrite for the links of a machine.

May import what `xla` may; nothing in it knows the planner.
"""
