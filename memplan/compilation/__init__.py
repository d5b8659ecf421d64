"""Compiles one program with a plan, and chooses the programs to compile until one fits.

May import `planning`, `program`, `xla`, `hardware`, and of `verify` what judges a module and a
program.
"""
