"""Loops over slabs as tables: one row each, with bytes read and written by memory."""

import json
from dataclasses import replace

import pytest

from memplan.report.model import Report
from memplan.report.slabs import Unsplit, loops_table, unsplit_table
from tests.report.conftest import AXIS, LOOPS, MIB


def test_each_loop_has_a_row() -> None:
    table = loops_table(LOOPS)
    assert table.title == f"Loops over slabs: {AXIS}"
    assert table.rows == (
        (
            "1",
            "16 of 32",
            "1",
            "2",
            "1.0 MiB",
            "32.0 MiB host",
            "1",
            "2 of 3",
            "1.00 ms",
            "../b/net.py:7",
        ),
        ("2", "16 of 32", "4", "9", "1.0 MiB, 32.0 MiB host", "-", "3", "-", "not known", ""),
    )
    assert all(len(row) == len(table.columns) for row in table.rows)


def test_several_axes_are_all_named_and_no_loops_are_no_table() -> None:
    on_rows = replace(LOOPS[0], axis="dimension 1 of float32[9,9]")
    assert (
        loops_table((*LOOPS, on_rows)).title
        == f"Loops over slabs: {AXIS}; dimension 1 of float32[9,9]"
    )
    assert loops_table(()).rows == ()


def test_unsplit_operations_are_sorted_by_size() -> None:
    ops = tuple(Unsplit(f"op{number}", number * MIB, "") for number in range(5))
    table = unsplit_table(ops, 2)
    assert [row[1] for row in table.rows] == ["op4", "op3"]
    assert table.title == "Not in slabs (the largest 2 of 5)"


def test_the_report_shows_them_and_older_documents_load(report: Report) -> None:
    assert (
        "2 loops over slabs" in str(report)
        and AXIS in str(report)
        and "Not in slabs" in str(report)
    )
    assert AXIS in report.to_html() and "Not in slabs" in report.to_html()
    document = json.loads(report.to_json())
    for name in ("slab_loops", "unsplit", "huge_arrays"):
        del document[name]
    assert Report.from_json(json.dumps(document)) == replace(
        report, slab_loops=(), unsplit=(), huge_arrays=None
    )


def test_a_loop_in_json_has_the_documented_form(report: Report) -> None:
    [first, _] = json.loads(report.to_json())["slab_loops"]
    volume = {"name": "x", "shape": [512, 512], "nbytes": MIB, "place": "device"}
    stored = {"name": "conv:3", "shape": [512, 512, 32], "nbytes": 32 * MIB, "place": "host"}
    assert first == {
        "number": 1, "axis": AXIS, "trips": 16, "rows": 32, "halo": 1, "ops": 2, "sums": 1, "seconds": 1e-3,
        "reads": [{**volume, "dtype": "float32"}], "writes": [{**stored, "dtype": "float32"}],
        "source": "/home/a/b/net.py:7", "copies": 2, "kernels": 1,
    }  # fmt: skip


def test_transfers_by_kernels_are_listed_with_the_copies(report: Report) -> None:
    assert "not memcpy" not in str(replace(report, copy_s=1e-3, loop_copies=3))
    text = " ".join(str(replace(report, copy_s=1e-3, loop_copies=3, loop_kernels=1)).split())
    assert "; 1 of 4 transfers in loops are kernels, not memcpy" in text


BEYOND = [(None, ""), (0, ""), (1, "1 array of it has 2^31"), (4, "4 arrays of it have 2^31")]


@pytest.mark.parametrize(("count", "said"), BEYOND)
def test_arrays_beyond_cudnn_are_listed_with_the_unmodified_step(
    report: Report, count: int | None, said: str
) -> None:
    text = " ".join(str(replace(report, huge_arrays=count)).split())
    assert (f"5.74 GiB; {said}" in text) if said else "2^31" not in text
