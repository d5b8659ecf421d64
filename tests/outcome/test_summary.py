"""What a report says beyond its figures: versions, and what happens to the residuals of loops."""

from __future__ import annotations

import importlib.metadata
import platform

import memplan
from memplan.outcome.summary import versions


def test_versions_are_of_what_changes_the_figures() -> None:
    jax = [(name, importlib.metadata.version(name)) for name in ("jax", "jaxlib")]
    assert versions() == (("memplan", memplan.__version__), ("python", platform.python_version()), *jax)
