"""Program -> Program, each named and recorded: residuals of loops, slabs, state on the host.

May import `program`, and from `planning` what chooses residuals and slabs.
"""
