"""The command line: options, output and exit codes.

May import `api`, `studies` and their results; plans nothing itself, and no room imports it.
"""

from memplan.cli.app import main

__all__ = ["main"]
