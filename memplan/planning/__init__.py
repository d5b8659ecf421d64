"""Decides the order of kernels, and which values are recomputed or offloaded to the host.

May import `hardware`; knows no jax and reads no text of XLA's.
"""
