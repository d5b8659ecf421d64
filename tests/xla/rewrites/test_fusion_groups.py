"""Which fusions become one: in an order that keeps who waits for whom, within the room, and never over what is read."""

from __future__ import annotations

import re

import pytest

from memplan.xla.rewrites.merge import MERGED_SHARE
from tests.hlo import read_module
from tests.xla.rewrites.test_merge import (
    ARRAY,
    BENT,
    DONATED,
    ENTRY,
    FAR,
    FUSED,
    INTEGER,
    KEPT,
    MASKED,
    NBYTES,
    PAIR,
    SUM,
    SUMS,
    THREE,
    bent,
    changed,
    fusions,
    library,
    made,
    returned,
)

# two of them read two arrays and make two, all three one more and two sums
SHARED = 5 * NBYTES + 2 * 2048

UPDATE = f"""
%update.0 (p: f32[1024,512], q: f32[512]) -> f32[1024,512] {{
  %p = {ARRAY} parameter(0)
  %q = {ARRAY} parameter(1)
  %c = s32[] constant(0)
  ROOT %u = {ARRAY} dynamic-update-slice(%p, %q, %c, %c)
}}
"""


@pytest.mark.parametrize(
    ("more", "order"),
    [
        ("", ["alone", "ahead", "sums.all1", "masked.all1", "far", "second", "out"]),
        (
            library("more", "far"),
            ["ahead", "sums.all1", "masked.all1", "far", "more", "alone", "second", "out"],
        ),
    ],
)
def test_what_makes_less_moves_past_the_other(more: str, order: list[str]) -> None:
    """As many bytes wait for the first of them as the second waits for, or more."""
    between = FAR + more + library("alone", "x") + library("ahead", "z")
    module = made(
        FUSED + ENTRY + MASKED + between + SUMS.replace("%z", "%ahead") + returned("far", "second")
    )
    assert module is not None
    assert list(module.entry.ops)[3:] == order


def test_nothing_is_merged_around_what_waits_between() -> None:
    assert made(changed(PAIR, ("fusion(%masked, %z)", "fusion(%masked, %far)"))) is None


@pytest.mark.parametrize(("reads", "merges"), [("%z, %y", True), ("%new, %y", False)])
def test_what_overwrites_an_argument_stays_behind_its_readers(reads: str, merges: bool) -> None:
    new = f"  %new = {ARRAY} fusion(%x, %z), kind=kLoop, calls=%update.0\n"
    late = BENT.replace("%x, %y", reads)
    module = made(
        changed(FUSED, DONATED)
        + UPDATE
        + ENTRY
        + MASKED
        + new
        + late
        + returned("new", "masked", "bent")
    )
    assert (module is not None) == merges
    assert module is None or list(fusions(module)) == ["bent.all1", "new"]


def test_one_group_reads_what_another_makes() -> None:
    late = BENT.replace("%bent =", "%late =").replace("%x, %y", "%masked, %z")
    later = MASKED.replace("%masked =", "%later =").replace("%y, %x", "%masked, %z")
    text = changed(FUSED, (KEPT, f"%n = {INTEGER} convert(%g)\n  ROOT %k = {ARRAY} convert(%n)"))
    module = made(text + ENTRY + MASKED + late + later + BENT + returned("bent", "late", "later"))
    assert module is not None
    assert fusions(module) == {"bent.all1": ("y", "x"), "later.all1": ("masked.all1", "z")}
    assert module.entry.ops["masked.all1"].operands == ("bent.all1",)


@pytest.mark.parametrize(
    ("nbytes", "left"), [(SHARED, 1), (SHARED - 1, 2), (4 * NBYTES, 2), (4 * NBYTES - 1, 3)]
)
def test_what_would_crowd_the_room_stays(nbytes: int, left: int) -> None:
    assert (
        len(fusions(made(THREE, int((nbytes + 0.5) / MERGED_SHARE)) or read_module(THREE))) == left
    )


def test_who_waits_by_control_waits_for_what_is_there() -> None:
    assert (
        made(changed(PAIR, ('target="far"', 'target="far", control-predecessors={%masked}')))
        is not None
    )


def test_a_kernel_does_not_overwrite_what_others_of_its_threads_read() -> None:
    rows = bent(
        f"%o = {SUM} parameter(2)", f"%w = {ARRAY} broadcast(%o), dimensions={{0}}", "add(%t, %w)"
    )[0]
    text = (
        changed(FUSED, ("=true", "=true, input_output_alias={ {0}: (3, {}, may-alias) }"), rows)
        + ENTRY
    )
    late = BENT.replace("%x, %y", "%x, %y, %v") + SUMS + returned("first", "second", "bent")
    module = made(f"{text}  %v = {SUM} parameter(3)\n{MASKED}{late}".replace("1024,512", "512,512"))
    assert module is None or not {"bent", "sums"}.isdisjoint(module.entry.ops)


@pytest.mark.parametrize(
    ("dtype", "along", "sums"),
    [("f32", 0, [4, 2]), ("f16", 0, [2, 2, 2]), ("f32", 1, [6]), ("f16", 1, [6])],
)
def test_the_tiles_of_all_sums_of_columns_have_room_in_a_block(
    dtype: str, along: int, sums: list[int]
) -> None:
    """Of half precision four elements are read at once, of floats two: 16.5 KB a sum, or 8.3."""
    shape = ARRAY.replace("f32", dtype)
    text = changed(
        FUSED,
        (f"%z = {ARRAY} parameter(1)", f"%h = {shape} parameter(1)\n  %z = {ARRAY} convert(%h)"),
    )
    text += changed(ENTRY, (f"%z = {ARRAY}", f"%z = {shape}"))
    text = text.replace("z: f32", f"z: {dtype}")
    for number, read in enumerate("xyx"):
        kernel = (
            SUMS.replace("%masked", f"%{read}")
            .replace("%first", f"%v{number}.1")
            .replace("%second", f"%v{number}.2")
        )
        text += re.sub(r"%sums\b(?!\.)", f"%sums{number}", kernel)
    text += returned(*(f"v{number}.{which}" for number in range(3) for which in (1, 2)))
    if along == 1:
        text = text.replace("dimensions={0}", "dimensions={1}").replace("f32[512]", "f32[1024]")
    module = made(text) or read_module(text)
    counts = [len(op.result) for op in module.entry.ops.values() if op.opcode == "fusion"]
    assert sorted(counts, reverse=True) == sums
