"""Integers that follow from the number of the partition, as the partitioner writes them."""

from __future__ import annotations

import pytest

from memplan.verify.partition_numbers import PartitionNumbers
from tests.hlo import read_instruction

TABLE = "%t = u32[4] constant({3, 1, 0, 2})"
ME = "%me = u32[] partition-id()"


def numbers(*lines: str) -> list[list[int]] | None:
    partition_numbers = PartitionNumbers(4)
    ops = [read_instruction(line) for line in lines]
    for op in ops:
        partition_numbers.read(op)
    values = partition_numbers[ops[-1].name]
    return None if values is None else values.reshape(4, -1).tolist()


@pytest.mark.parametrize(
    ("lines", "wanted"),
    [
        ([ME], [0, 1, 2, 3]),
        ([TABLE, ME, "%x = u32[1] dynamic-slice(%t, %me), dynamic_slice_sizes={1}"], [3, 1, 0, 2]),
        ([ME, "%five = u32[] constant(5)", "%x = u32[] multiply(%me, %five)"], [0, 5, 10, 15]),
        ([ME, "%two = u32[] constant(2)", "%x = u32[] divide(%me, %two)"], [0, 0, 1, 1]),
        ([ME, "%two = u32[] constant(2)", "%x = u32[] remainder(%me, %two)"], [0, 1, 0, 1]),
        (
            [ME, "%one = u32[] constant(1)", "%x = u32[] shift-right-logical(%me, %one)"],
            [0, 0, 1, 1],
        ),
        (
            [
                ME,
                "%low = u32[] constant(1)",
                "%high = u32[] constant(2)",
                "%x = u32[] clamp(%low, %me, %high)",
            ],
            [1, 1, 2, 2],
        ),
        (
            [
                ME,
                "%s = s32[] convert(%me)",
                "%two = s32[] constant(2)",
                "%x = s32[] subtract(%s, %two)",
            ],
            [-2, -1, 0, 1],
        ),
        (
            [ME, "%two = u32[] constant(2)", "%x = u32[] subtract(%me, %two)"],
            [2**32 - 2, 2**32 - 1, 0, 1],
        ),
        (
            [TABLE, ME, "%x = u32[2] dynamic-slice(%t, %me), dynamic_slice_sizes={2}"],
            [[3, 1], [1, 0], [0, 2], [0, 2]],
        ),
        (
            [ME, "%x = u32[2] broadcast(%me), dimensions={}"],
            [[0, 0], [1, 1], [2, 2], [3, 3]],
        ),
    ],
)
def test_knows_what_follows_from_the_partition(
    lines: list[str], wanted: list[int] | list[list[int]]
) -> None:
    assert numbers(*lines) == [row if isinstance(row, list) else [row] for row in wanted]


@pytest.mark.parametrize(
    "lines",
    [
        ["%x = u32[] parameter(0)"],
        ["%p = u32[] parameter(0)", ME, "%x = u32[] add(%p, %me)"],
        [ME, "%x = f32[] convert(%me)"],
        ["%x = u32[4] iota(), iota_dimension=0"],
        [TABLE, "%x = u32[4,2] broadcast(%t), dimensions={0}"],
        [ME, "%none = u32[] constant(0)", "%x = u32[] divide(%me, %none)"],
        [ME, "%many = u32[] constant(32)", "%x = u32[] shift-left(%me, %many)"],
        ["%a = s32[] constant(-3)", "%two = s32[] constant(2)", "%x = s32[] divide(%a, %two)"],
    ],
)
def test_knows_nothing_else(lines: list[str]) -> None:
    assert numbers(*lines) is None
