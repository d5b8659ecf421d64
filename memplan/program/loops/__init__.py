"""Program -> Program: pairs of loops with other residuals.

May import `program`, not `slabs` or `state`; from `planning` what chooses residuals.
"""
