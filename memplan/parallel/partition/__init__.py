"""Which block of what lies on which device: rules, the walk that assigns layouts, and the step that one device runs.

May import `program`, `emit` and the plain data of `planning`; never `runtime`.
"""
