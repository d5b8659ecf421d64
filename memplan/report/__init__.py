"""Telling: what was planned and measured, as data, tables, pages, pictures and traces. Computes nothing.

May import `io`, and plain types of `hardware` and `planning`.
"""
