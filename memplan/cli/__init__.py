"""The command line: what is typed, what is printed, how it ends.

May import `api`, `studies` and what they answer with; plans nothing itself, and nobody imports it.
"""

from memplan.cli.app import main

__all__ = ["main"]
