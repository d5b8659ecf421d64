"""What came of a compilation: its report, its memory over time, and the step to be called.

May import `compilation` and below, and `report`, whose rows it fills.
"""
