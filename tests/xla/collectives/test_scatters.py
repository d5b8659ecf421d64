"""Reduce-scatters level by level: what is written, which stay, and that the sums are the same."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.hardware.machine import Groups, Machine
from memplan.xla.collectives.scatters import scatters_in_phases
from memplan.xla.module import Module
from tests.hlo import groups_text, read_module, short_lines_of
from tests.xla.collectives.interpreter import run
from tests.xla.collectives.machines import Case, cases, collectives, groups_along, slow_outside

SCOPE = "jit(step)/transpose(jvp())/dot_general"
ORIGIN = f'metadata={{op_name="{SCOPE}"}}'
TWO_BY_FOUR = slow_outside(2, 4)
HOST_MAJOR = groups_along(TWO_BY_FOUR, (0, 1))
ADD = """%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}"""


def module(*lines: str) -> Module:
    body = "\n".join(f"  {line}" for line in lines)
    return read_module(
        f"HloModule step\n\n{ADD}\n\nENTRY %main () -> f32[] {{\n{body}\n}}\n", scheduled=False
    )


def shape(dims: Sequence[int], dtype: str = "f32") -> str:
    return (
        f"{dtype}[{','.join(map(str, dims))}]{{{','.join(map(str, reversed(range(len(dims)))))}}}"
    )


def attributes(groups: Groups) -> str:
    return f"channel_id=1, replica_groups={groups_text(groups)}, use_global_device_ids=true, to_apply=%add"


def cut_sum(
    whole: Sequence[int], piece: Sequence[int], dim: int, groups: Groups, offset: Sequence[str]
) -> Module:
    """An all-reduce, and each partition's piece of it, at an offset that these lines make."""
    starts = ", ".join("%start" if at == dim else "%zero" for at in range(len(whole)))
    return module(
        f"%p = {shape(whole)} parameter(0)",
        f"%sum = {shape(whole)} all-reduce(%p), {attributes(groups)}, {ORIGIN}",
        "%zero = s32[] constant(0)",
        "%partition = u32[] partition-id()",
        *offset,
        f"ROOT %piece = {shape(piece)} dynamic-slice(%sum, {starts}), "
        f"dynamic_slice_sizes={{{','.join(map(str, piece))}}}, {ORIGIN}",
    )


def looked_up(starts: Sequence[int]) -> list[str]:
    """An offset from a table, as XLA's partitioner writes it where it is no multiple of the partition's number."""
    count = len(starts)
    return [
        f"%table = s32[{count}]{{0}} constant({{{', '.join(map(str, starts))}}}), {ORIGIN}",
        "%row = s32[1]{0} dynamic-slice(%table, %partition), dynamic_slice_sizes={1}",
        "%start = s32[] reshape(%row)",
    ]


def by_number(piece: int) -> list[str]:
    return [
        "%number = s32[] convert(%partition)",
        f"%side = s32[] constant({piece}), {ORIGIN}",
        "%start = s32[] multiply(%number, %side)",
    ]


def in_phases(plain: Module, machine: Machine) -> Module:
    return scatters_in_phases(plain, machine)


def test_the_pieces_are_put_side_by_side_and_summed_inside_the_host_first() -> None:
    plain = cut_sum((256, 64), (256, 8), 1, HOST_MAJOR, by_number(8))
    shaped = in_phases(plain, TWO_BY_FOUR)
    assert short_lines_of(shaped)[-6:] == [
        "%sum.split1 = f32[256,2,4,8] reshape(%p)",
        "%sum.turned1 = f32[4,2,256,8] transpose(%sum.split1), dimensions={2,1,0,3}",
        "%sum.scatter1 = f32[1,2,256,8] reduce-scatter(%sum.turned1), channel_id=2, "
        "replica_groups={{0,1,2,3},{4,5,6,7}}, use_global_device_ids=true, dimensions={0}, to_apply=%add",
        "%sum.part1 = f32[2,256,8] reshape(%sum.scatter1)",
        "%sum.scatter2 = f32[1,256,8] reduce-scatter(%sum.part1), channel_id=3, "
        "replica_groups={{0,4},{1,5},{2,6},{3,7}}, use_global_device_ids=true, dimensions={0}, to_apply=%add",
        "ROOT %piece = f32[256,8] reshape(%sum.scatter2)",
    ]
    assert shaped.entry.root.shape == plain.entry.root.shape
    assert "sum" not in shaped.entry.ops
    assert {op.op_name for op in list(shaped.entry.ops.values())[-6:]} == {SCOPE}


def test_each_byte_passes_the_link_of_a_host_once() -> None:
    nbytes = 256 * 64 * 4
    shaped = in_phases(cut_sum((256, 64), (256, 8), 1, HOST_MAJOR, by_number(8)), TWO_BY_FOUR)
    assert [collective.outside_nbytes for collective in collectives(shaped, TWO_BY_FOUR)] == [
        0,
        nbytes / 2,
    ]


@given(cases(), st.booleans())
def test_the_same_sums(case: Case, own: bool) -> None:
    """As reduce-scatters, which `shard_map` writes, and as what XLA's partitioner writes."""
    starts = [0] * len(case.machine.devices)
    for group in case.groups:
        for position, member in enumerate(group):
            starts[member] = position * case.piece[case.dim]
    plain = cut_sum(case.whole, case.piece, case.dim, case.groups, looked_up(starts))
    if own:
        plain = module(
            f"%p = {shape(case.whole)} parameter(0)",
            f"ROOT %piece = {shape(case.piece)} reduce-scatter(%p), {attributes(case.groups)}, "
            f"dimensions={{{case.dim}}}, {ORIGIN}",
        )
    shaped = in_phases(plain, case.machine)
    assert (shaped is not plain) == case.reaches_levels
    whole = (
        np.random.default_rng(0).integers(-99, 99, (len(starts), *case.whole)).astype(np.float32)
    )
    ((expected,), (actual,)) = run(plain, whole), run(shaped, whole)
    assert actual.tobytes() == expected.tobytes()


@given(st.permutations(range(8)))
def test_pieces_in_any_order_of_partitions_are_right_where_they_are_taken(order: list[int]) -> None:
    plain = cut_sum((16, 3), (2, 3), 0, HOST_MAJOR, looked_up([2 * place for place in order]))
    whole = np.random.default_rng(0).integers(-99, 99, (8, 16, 3)).astype(np.float32)
    ((expected,), (actual,)) = run(plain, whole), run(in_phases(plain, TWO_BY_FOUR), whole)
    assert actual.tobytes() == expected.tobytes()


PIECES = (64, 8), (8, 8), 0, HOST_MAJOR
STAY = {
    "within a host": cut_sum(
        (64, 8), (16, 8), 0, groups_along(TWO_BY_FOUR, (1,)), looked_up([0, 16, 32, 48] * 2)
    ),
    "one device of each host": cut_sum(
        (64, 8), (32, 8), 0, groups_along(TWO_BY_FOUR, (0,)), looked_up([0, 32] * 4)
    ),
    "all the same piece": cut_sum(*PIECES, looked_up([8] * 8)),
    "one piece twice": cut_sum(*PIECES, looked_up([0, 0, 16, 24, 32, 40, 48, 56])),
    "not at the pieces' borders": cut_sum(*PIECES, looked_up([0, 7, 16, 24, 32, 40, 48, 56])),
    "pieces beyond the end": cut_sum(*PIECES, by_number(16)),
    "places from an argument": cut_sum(*PIECES, ["%start = s32[] parameter(1)"]),
    "cut along two dimensions": module(
        "%p = f32[64,8]{1,0} parameter(0)",
        f"%sum = f32[64,8]{{1,0}} all-reduce(%p), {attributes(HOST_MAJOR)}",
        "%zero = s32[] constant(0)",
        "ROOT %piece = f32[8,4]{1,0} dynamic-slice(%sum, %zero, %zero), dynamic_slice_sizes={8,4}",
    ),
    "the whole sum is read too": module(
        *(line.replace("ROOT ", "") for line in short_lines_of(cut_sum(*PIECES, by_number(8)))),
        "ROOT %both = (f32[8,8]{1,0}, f32[64,8]{1,0}) tuple(%piece, %sum)",
    ),
    "nobody reads it": module(
        "%p = f32[8]{0} parameter(0)", f"%s = f32[8]{{0}} all-reduce(%p), {attributes(HOST_MAJOR)}"
    ),
    "of several arrays": module(
        "%p = f32[8]{0} parameter(0)",
        f"ROOT %s = (f32[1]{{0}}, f32[1]{{0}}) reduce-scatter(%p, %p), {attributes(HOST_MAJOR)}, dimensions={{0}}",
    ),
}


@pytest.mark.parametrize("plain", STAY.values(), ids=STAY)
def test_what_stays(plain: Module) -> None:
    assert in_phases(plain, TWO_BY_FOUR) is plain
