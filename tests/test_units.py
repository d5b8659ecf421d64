"""Sizes as people write them, the ones they mistype, and figures as they read them."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.errors import BudgetError, MemplanError
from memplan.units import format_bytes, format_flops, format_seconds, parse_bytes, show_bytes

WHOLE = 16 * 2**30
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
         "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}  # fmt: skip


@pytest.mark.parametrize(
    ("written", "nbytes"),
    [
        *[
            (None, WHOLE),
            (0, 0),
            (123, 123),
            (10**18, 10**18),
            ("123", 123),
            ("0", 0),
            ("16GiB", WHOLE),
        ],
        *[
            (" 16 gib ", WHOLE),
            ("1.5 KiB", 1536),
            (".5KiB", 512),
            ("2.KiB", 2048),
            ("500 MB", 500_000_000),
        ],
        *[("80%", WHOLE * 8 // 10), ("100 %", WHOLE), ("0%", 0), ("12.5%", WHOLE // 8)],
    ],
)
def test_sizes(written: Any, nbytes: int) -> None:
    assert parse_bytes(written, WHOLE) == nbytes


@given(
    st.integers(0, 2**70), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " "]), st.booleans()
)
def test_whole_numbers_of_any_unit_are_exact(
    number: int, unit: str, space: str, lower: bool
) -> None:
    text = f"{number}{space}{unit}"
    assert parse_bytes(text.lower() if lower else text, WHOLE) == number * UNITS[unit]


@given(st.integers(0, 100), st.integers(0, 2**60))
def test_shares_are_rounded_down_and_never_more_than_there_is(percent: int, whole: int) -> None:
    assert parse_bytes(f"{percent}%", whole) == whole * percent // 100


@pytest.mark.parametrize(
    ("written", "says"),
    [
        *(
            (text, "not a budget")
            for text in ("", "GiB", "%", "-1", "-1GiB", "1e9", "1_000", "1,5 GiB")
        ),
        *((text, "not a budget") for text in ("0x10", "nan", "inf", "1 2", "9" * 5000)),
        ("16 gigs", "'gigs' in the budget '16 gigs' is not a unit"),
        ("16 G", "not a unit"),
        ("1e", "not a unit"),
        ("101%", "more than 100 %"),
        ("100.1%", "more than 100 %"),
        (-1, "negative"),
        (True, "it is a bool"),
        (1.5, "it is a float"),
        (b"1", "it is a bytes"),
        ([1], "it is a list"),
    ],
)
def test_mistakes_are_named_and_helped(written: Any, says: str) -> None:
    with pytest.raises(BudgetError, match=says) as caught:
        parse_bytes(written, WHOLE)
    assert isinstance(caught.value, MemplanError) and isinstance(caught.value, ValueError)
    assert '"16GiB"' in str(caught.value) and '"80%"' in str(caught.value)


@given(st.text(max_size=12))
def test_any_text_is_a_size_or_a_budget_error(text: str) -> None:
    with contextlib.suppress(BudgetError):
        assert parse_bytes(text, WHOLE) >= 0


def test_the_message_speaks_of_what_was_asked() -> None:
    with pytest.raises(BudgetError, match="not a host budget"):
        parse_bytes("lots", WHOLE, what="host budget")


@pytest.mark.parametrize(
    ("nbytes", "shown"),
    [
        *[
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.0 KiB"),
            (2**20 - 1, "1024.0 KiB"),
            (2**20, "1.0 MiB"),
        ],
        *[
            (int(5583.1 * 2**20), "5583.1 MiB"),
            (10 * 2**30, "10.0 GiB"),
            (int(15.8 * 2**30), "15.8 GiB"),
        ],
        (2**50, "1048576.0 GiB"),
    ],
)
def test_bytes_in_messages(nbytes: int, shown: str) -> None:
    assert show_bytes(nbytes) == shown


@given(st.integers(0, 2**60))
def test_what_is_shown_can_be_written_back(nbytes: int) -> None:
    unit = UNITS[show_bytes(nbytes).split()[1]]
    assert abs(parse_bytes(show_bytes(nbytes), WHOLE) - nbytes) <= 0.05 * unit + 1


SECONDS = [
    (None, "not known"),
    (0, "0 s"),
    (0.25, "250 ms"),
    (12.3, "12.3 s"),
    (3.21e-6, "3.21 us"),
]
BYTES = [
    (None, "not known"),
    (0, "0 B"),
    (1023, "1023 B"),
    (1536, "1.5 KiB"),
    (5 * 2**20, "5.0 MiB"),
]
FLOPS = [(0.0, "0 FLOP"), (12.0, "12 FLOP"), (1.234e12, "1.23 TFLOP")]


@pytest.mark.parametrize(
    ("show", "value", "written"),
    [
        *((format_bytes, *row) for row in (*BYTES, (2**34, "16.00 GiB"))),
        *((format_seconds, *row) for row in (*SECONDS, (1e-9, "1e-09 s"))),
        *((format_flops, *row) for row in FLOPS),
    ],
)
def test_figures_in_tables(show: Callable[[Any], str], value: Any, written: str) -> None:
    assert show(value) == written
