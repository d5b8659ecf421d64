"""Program -> Program: parts of the training state in host memory.

Imports `program`'s files and types, not `slabs` or `loops`.
"""
