"""highspy from 1.13 on and ortools each bring their own libhighs.so.1, and a process can load only one of the two."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version


def _clash() -> bool:
    try:
        return tuple(map(int, version("highspy").split(".")[:2])) >= (1, 13)
    except PackageNotFoundError:
        return False


IGNORED = ["test_*.py"] if _clash() and "MEMPLAN_APART" not in os.environ else []
"""What is not collected in a process that also tests the other planners (`tests/planning/test_apart.py` runs it)."""
