"""How figures are written."""

from __future__ import annotations

import pytest

from memplan.report.views import table


@pytest.mark.parametrize(
    ("nbytes", "written"),
    [
        (None, "not known"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (5 * 2**20, "5.0 MiB"),
        (2**34, "16.00 GiB"),
    ],
)
def test_bytes_are_written_in_binary_units(nbytes: int | None, written: str) -> None:
    assert table.size(nbytes) == written


@pytest.mark.parametrize(
    ("value", "written"),
    [(None, "not known"), (0, "0 s"), (0.25, "250 ms"), (12.3, "12.3 s"), (3.21e-6, "3.21 us"), (1e-9, "1e-09 s")],
)
def test_seconds_have_three_digits(value: float | None, written: str) -> None:
    assert table.seconds(value) == written


@pytest.mark.parametrize(("value", "written"), [(0.0, "0 FLOP"), (12.0, "12 FLOP"), (1.234e12, "1.23 TFLOP")])
def test_flops_have_three_digits(value: float, written: str) -> None:
    assert table.flops(value) == written


@pytest.mark.parametrize(
    ("source", "written"),
    [("", ""), ("net.py:3", "net.py:3"), ("/a/b/c/net.py:3", "../c/net.py:3"), ("c/d/net.py:3", "c/d/net.py:3")],
)
def test_long_sources_keep_their_end(source: str, written: str) -> None:
    assert table.short_source(source) == written


def test_a_title_owns_up_to_what_it_leaves_out() -> None:
    assert table.largest("Decisions", 3, 3) == "Decisions (3)"
    assert table.largest("Decisions", 3, 9) == "Decisions (the largest 3 of 9)"
