"""Decides: in which order kernels run, what is recomputed, what is offloaded to the host.

May import `hardware`; knows no jax and reads no text of XLA's.
"""
