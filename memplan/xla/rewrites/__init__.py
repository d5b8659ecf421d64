"""A scheduled module -> another that computes the same bits with fewer bytes: fusions inlined, merged, split.

May import the reader of modules beside it, and the types of `planning`.
"""
