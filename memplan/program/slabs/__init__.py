"""Program -> Program: equations along one axis in loops over slabs.

Imports `program`'s files and types, not `loops` or `state`; from `planning` what prices and chooses slabs.
"""
