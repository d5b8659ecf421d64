"""A scheduled module -> another with the same bits and fewer bytes: fusions inlined, merged, split.

May import the reader of modules beside it, and the types of `planning`.
"""
