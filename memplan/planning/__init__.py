"""Decides: which kernels run when, which run again, what is copied to the host.

May import `hardware`; knows no jax and reads no text of XLA's.
"""
