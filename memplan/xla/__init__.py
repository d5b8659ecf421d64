"""The compiler: asked, read and written, each in one place.

May import `program` (what is compiled), the types of `planning` and `hardware`. No other room reads
what XLA says.
"""
