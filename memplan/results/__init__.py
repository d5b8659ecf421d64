"""Results of a compilation: the report, memory over time, the callable step, errors with advice.

May import `compilation` and below, and `report`, whose rows it fills.
"""
