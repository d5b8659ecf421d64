"""Placements (which block of an array is on which device), and their propagation through the arrays of a step.

May import `program`; knows nothing of collectives.
"""
