"""Program -> Program: equations along one axis in loops over slabs.

May import `program`, not `loops` or `state`; from `planning` what prices and chooses slabs.
"""
