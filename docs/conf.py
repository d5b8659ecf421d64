"""How the site is built: Sphinx, guides in MyST Markdown whose code runs during the build. Warnings are errors there."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Guides run in kernels of their own: on the CPU, with this checkout and without a driver's complaints.
os.environ["JAX_PLATFORMS"] = "cpu"
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
nitpicky = False  # types of jax in signatures have no page here
suppress_warnings = ["config.cache"]

nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 120  # seconds for a cell
nb_output_stderr = "remove-warn"  # what a guide writes there is a fault of the guide
nb_merge_streams = True

myst_enable_extensions = ["colon_fence"]
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # they stand in the signature
autodoc_class_signature = "separated"
