"""Results of a compilation: the report, memory over time, the step to be called, errors with advice.

May import `compilation` and below, and `report`, whose rows it fills.
"""
