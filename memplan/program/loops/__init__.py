"""Program -> Program: other residuals of loops, conditionals and `shard_map`s.

May import `program`, not `slabs` or `state`; from `planning` what chooses residuals.
"""
