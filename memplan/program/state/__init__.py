"""Program -> Program: parts of the training state in host memory.

May import `program`, not `slabs` or `loops`.
"""
