"""The page of findings has only real cards, correct ratios, and all rows."""

from pathlib import Path
from typing import Any

import pytest

from experiments.gpu.card import STAND_IN, driver_version
from experiments.gpu.findings import page


def test_without_a_row_the_page_says_that_no_card_was_asked() -> None:
    kept = Path("experiments/gpu/results")
    if not list(kept.glob("*.json")):
        assert (kept / "FINDINGS.md").read_text() == page([], [])
    assert "No real card has been asked" in page([], [])


def test_a_row_of_the_stand_in_is_refused_and_labelled_where_it_is_tried() -> None:
    rows = [_row("real"), _row("toy", real=False, how=STAND_IN)]
    with pytest.raises(ValueError, match="not a real card's: toy"):
        page(rows, [])
    tried = page(rows, [], toy=True)
    assert "None of this is a GPU's" in tried
    assert f"## {STAND_IN}" in tried


def test_figures_have_their_units_and_ratios_their_spread() -> None:
    pairs = {"step_s": [0.03, 0.02], "peak_bytes": [3 << 30, 2 << 30], "link_bytes/s": [50e9, None]}
    rows = [_row("one", pairs), _row("two", {"step_s": [0.05, 0.02]})]
    lines = page(rows, []).splitlines()
    assert "| step | 30.0 ms | 20.0 ms | 1.500 |" in lines
    assert "| peak | 3.00 GiB | 2.00 GiB | 1.500 |" in lines
    assert "| link | 50.0 GB/s | not known |  |" in lines
    assert "| step | 2 | 2.000 | 1.500 | 2.500 |" in lines


def test_what_failed_stands_there_with_its_words_and_what_it_had_found() -> None:
    lines = page(
        [{**_row("one", {"step_s": [0.03, 0.02]}), "error": "ran longer than 150 s: words"}], []
    ).splitlines()
    assert "### Failed: one" in lines and "ran longer than 150 s: words" in lines
    assert "| step | 30.0 ms | 20.0 ms | 1.500 |" in lines


def test_what_is_missing_is_named() -> None:
    assert "Not measured: two; three." in page([_row("one")], ["one", "two", "three"]).splitlines()
    assert "Not measured" not in page([_row("one")], ["one"])


def test_only_nvidias_own_file_is_a_driver() -> None:
    line = "7f00-7f01 r--p 00000000 00:1b 42                 {}\n"
    assert (
        driver_version(line.format("/usr/lib/x86_64-linux-gnu/libcuda.so.580.159.04"))
        == "580.159.04"
    )
    assert driver_version(line.format("/root/.cache/memplan-tests/stand-in/lib/libcuda.so.1")) == ""
    assert driver_version(line.format("/tmp/lib/libfakegpu.so")) == ""


def _row(
    name: str, pairs: Any = None, *, real: bool = True, how: str = "NVIDIA H100, driver 580.1"
) -> dict[str, Any]:
    card = {"real": real, "how": how, "versions": {"jax": "0.12.0.1"}}
    return {
        "name": name,
        "card": card,
        "environment": {},
        "seconds": 1.0,
        "pairs": pairs or {},
        "facts": {"status": "fits"},
    }
