"""Studies that compile often: other methods, budgets, sizes; and the rates of this machine.

May import `pipeline` and below, and `report`, whose results they fill; `api` and `cli` call them.
"""
