"""Which block of what lies on which device: placements, and the walk that assigns one to every array of a step.

May import `program`; knows nothing of collectives.
"""
