"""How the site is built: by Sphinx, from guides in MyST Markdown whose code runs meanwhile.

python -m sphinx -W --keep-going -q -b html docs build/docs    # warnings are errors
"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

# Guides run in kernels of their own: on the CPU, with this checkout and without a driver's complaints.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["KERAS_BACKEND"] = "jax"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))

project = "memplan"
author = "The memplan authors"
release = importlib.metadata.version("memplan")

extensions = [
    "myst_nb",  # runs the guides
    "sphinx.ext.autodoc",  # reads the docstrings
    "sphinx.ext.napoleon",  # in their Args, Returns, Raises form
]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "memplan"

nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 900  # seconds for a cell
nb_output_stderr = "remove"  # jax's CUDA plugin complains there where no driver is
nb_merge_streams = True
nb_render_markdown_format = "myst"  # tables in what a cell shows

myst_enable_extensions = ["colon_fence"]
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # they stand in the signature


def code_spans(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Docstrings say `code` as Markdown does, also right before a letter; Sphinx reads ``code``\\ s."""
    text = re.sub(
        r"(?<!`)`([^`]+)`(?!`)(?=(\w?))", lambda match: f"``{match[1]}``" + "\\ " * bool(match[2]), "\n".join(lines)
    )
    lines[:] = text.split("\n")


def stamp(app: Any, page: str, source: list[str]) -> None:
    """End a page with the day and the versions of this build, which has just run its code."""
    origin = "The code of this page ran" if "{code-cell}" in source[0] else "This page was built"
    with_versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("memplan", "jax", "jaxlib"))
    day = datetime.datetime.now(datetime.UTC).date()
    source[0] += f"\n\n---\n\n*{origin} on {day}, with {with_versions} and Python {platform.python_version()}.*\n"


def setup(app: Any) -> None:
    app.connect("source-read", stamp)
    app.connect("autodoc-process-docstring", code_spans, priority=400)  # before napoleon
