"""memplan's own planner: evict until it fits, then repair what costs the most, on a tape of slots.

May import `planning`.
"""
