"""Program -> Program: pairs of loops with other residuals.

Imports `program`'s files and types, not `slabs` or `state`; from `planning` what chooses residuals.
"""
