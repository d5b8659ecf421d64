"""The step as one device runs it: equations on its own parts, and collectives in the cheapest phases and buckets.

May import `partition`, whose placements it follows, `program`, `planning` and `hardware`.
"""
