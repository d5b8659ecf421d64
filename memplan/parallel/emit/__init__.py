"""What travels between devices: sums, gathers and compressed messages, in the phases and buckets that cost least.

May import `program`, what `partition` assigned and the plain data of `planning`; never `runtime`.
"""
