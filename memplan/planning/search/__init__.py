"""memplan's own planner: eviction until it fits, then large-neighbourhood search, on a tape of slots and its ledger.

May import `planning`.
"""
