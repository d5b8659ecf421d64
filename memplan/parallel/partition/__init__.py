"""Which block of what lies on which device: placements, and their propagation through the arrays of a step.

May import `program`; knows nothing of collectives.
"""
