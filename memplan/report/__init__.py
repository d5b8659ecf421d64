"""Plans and measurements as data, tables, pages, pictures and traces. Computes nothing.

May import `io`, `units`, and plain types of `hardware` and `planning`.
"""
