"""How results are drawn: text, HTML, Perfetto, pictures.

May import the rows that they draw, and `units`.
"""
