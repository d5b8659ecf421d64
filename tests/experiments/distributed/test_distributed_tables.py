"""The READMEs match the committed results."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments import distributed
from experiments.distributed.every_step import run as every_step
from experiments.distributed.slow_link import run as slow_link
from experiments.readme import inserted

FOLDER = Path(distributed.__file__).parent
TABLES = {"every_step": every_step.table, "slow_link": slow_link.table}


@pytest.mark.parametrize("name", TABLES)
def test_readme_is_what_the_results_say(name: str) -> None:
    text = (FOLDER / name / "README.md").read_text()
    assert text == inserted(text, TABLES[name]())
