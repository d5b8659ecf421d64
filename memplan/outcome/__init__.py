"""What came of a compilation: its report, its memory over time, and the step to be called.

May import `pipeline` and below, and `report`, whose rows it fills.
"""
