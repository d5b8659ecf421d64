"""One compilation with a plan in its middle, and the order in which programs are compiled until one fits.

May import `planning`, `program`, `xla`, `hardware`, and of `verify` what judges a module and a program.
"""
