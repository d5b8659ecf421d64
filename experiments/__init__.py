"""Measurements: a bench, planners on bare graphs, a GPU, many processes, and applications."""
