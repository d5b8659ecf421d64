"""Questions that take many compilations: other ways, budgets, sizes, devices; and the rates of this machine.

May import `pipeline` and below, and `report`, whose results they fill; `api` and `cli` are its doors.
"""
