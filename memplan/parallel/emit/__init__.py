"""The step as one device runs it: its own parts, and what travels, in the phases and buckets that cost least.

May import `partition`, whose placements it goes by, `program`, `planning` and `hardware`.
"""
