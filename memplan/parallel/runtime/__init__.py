"""The processes of a run: started, joined, compared, watched and resumed.

May import `program.compat` and `errors`; knows nothing of steps.
"""
