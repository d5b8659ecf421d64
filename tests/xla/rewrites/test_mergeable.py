"""Which fusions may be merged at all: those that go through one array element by element, and maybe sum it up."""

from __future__ import annotations

import pytest

from memplan.xla.rewrites.fusion_groups import Mergeable, mergeable
from memplan.xla.shapes import Array, Layout
from tests.hlo import read_module
from tests.xla.rewrites.test_merge import (
    ARRAY,
    BENT,
    KIND,
    NBYTES,
    OTHER_SUM,
    SUM,
    THREE,
    bent,
    changed,
)


def of(text: str, name: str) -> Mergeable | None:
    module = read_module(text)
    return mergeable(module, module.entry, module.entry.ops[name])


def test_a_loop_goes_through_its_result() -> None:
    candidate = of(THREE, "masked")
    assert candidate is not None
    assert (candidate.space, candidate.sums) == (((1024, 512), Layout((1, 0))), ())
    assert candidate.reads == {"y": NBYTES, "x": NBYTES}
    assert (candidate.makes, candidate.arrays) == (("masked",), 3)


def test_sums_go_through_what_they_sum() -> None:
    candidate = of(THREE, "sums")
    assert candidate is not None
    assert candidate.space == ((1024, 512), Layout((1, 0)))
    summed = Array.row_major("f32", (1024, 512)), (0,), Array.row_major("f32", (512,))
    assert candidate.sums == (summed, summed)
    assert (candidate.makes, candidate.arrays) == (("sums{0}", "sums{1}"), 4)


def test_little_that_it_reads_is_not_counted() -> None:
    little = THREE.replace("1024,512", "511,512")
    candidate = of(little, "masked")
    assert candidate is not None and candidate.reads == {} and candidate.arrays == 3


def test_what_it_reads_is_known_behind_views() -> None:
    views = f"  %flat = f32[524288]{{0}} bitcast(%y)\n  %back = {ARRAY} bitcast(%flat)\n"
    candidate = of(changed(THREE, (BENT, views + BENT.replace("%y", "%back"))), "bent")
    assert candidate is not None and set(candidate.reads) == {"x", "y"}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("far", []),
        ("bent", bent("transpose(%t), dimensions={0,1}")),
        ("bent", bent("reverse(%t), dimensions={0}")),
        ("bent", [(KIND, "kind=kCustom, calls=%bent.0")]),
        ("bent", [(KIND, "kind=kInput, calls=%bent.0")]),  # and sums nothing
        ("bent", OTHER_SUM),  # and is no kInput
        # computes nothing
        ("bent", [(f"ROOT %u = {ARRAY} tanh(%t)", f"ROOT %u = {ARRAY} bitcast(%p)")]),
        (
            "sums",
            [
                (
                    f"%b = {SUM} reduce(%m, %c), dimensions={{0}}, to_apply=%add.0",
                    f"%b = {SUM} negate(%a)",
                )
            ],
        ),  # of a sum
        # handed on as a whole
        ("sums", [("  %first", f"  %both = ({SUM}, {SUM}) opt-barrier(%sums)\n  %first")]),
    ],
)
def test_other_fusions_are_not(name: str, changes: list[tuple[str, str]]) -> None:
    text = THREE
    for old, new in changes:
        text = text.replace(old, new, 1)
    assert text != THREE or not changes
    assert of(text, name) is None


def test_what_is_the_root_stays() -> None:
    head, _, _ = THREE.rpartition("  ROOT")
    assert of(head.replace("  %bent = ", "  ROOT %bent = ") + "}\n", "bent") is None


def test_other_elements_are_another_space() -> None:
    for shape in ("f32[1024,512]{0,1}", "f32[512,1024]{1,0}"):
        candidate = of(changed(THREE, *bent("tanh(%t)", shape=shape)), "bent")
        assert candidate is not None and candidate.space != ((1024, 512), Layout((1, 0)))
