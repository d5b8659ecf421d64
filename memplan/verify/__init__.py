"""Verifiers: does the planned module compute the plain one? They share no code with planners.

May import `program`'s jaxprs, and `xla`'s reader of modules.
"""
