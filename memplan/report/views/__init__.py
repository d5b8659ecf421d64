"""Draws results: text, HTML, Perfetto, pictures.

May import the rows that they draw, and `units`.
"""
