"""memplan's own planner: evicts until the plan fits, then searches large neighbourhoods of it.

May import `planning`.
"""
