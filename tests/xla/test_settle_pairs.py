"""Collectives under way that hold much of a room become synchronous, the largest first."""

from __future__ import annotations

import pytest

from memplan.hardware.backend import GPU
from memplan.verify.same_module import judge
from memplan.xla.buffers import problem_of
from memplan.xla.module import Module
from memplan.xla.settle_pairs import settle_pairs
from tests.xla.collective_modules import ALL, fusion, gathered, module, summed
from tests.xla.small_modules import BIG, MIB

SHARD = "f32[64,1024]{1,0}"


def step() -> Module:
    """Two gathers from the beginning, a scatter and a sum until the end; 2 MiB each."""
    shard = f"%w = {SHARD} slice(%a), slice={{[0:64], [0:1024]}}"
    gathers = [gathered(name, "w", SHARD) for name in ("g", "h")]
    scatter = (
        f"%r = (({BIG}), {SHARD}) reduce-scatter-start(%z), {ALL}, dimensions={{0}}, to_apply=%plus"
    )
    scattered = f"%r.done = {SHARD} reduce-scatter-done(%r)"
    start, done = summed("s", "v")
    root = f"ROOT %out = ({BIG}, {SHARD}, {BIG}) tuple(%u, %r.done, %s.done)"
    begin = shard, gathers[0][0], gathers[1][0], fusion("x", "a", "b"), gathers[0][1]
    middle = (
        fusion("y", "x", "g.done"),
        gathers[1][1],
        fusion("z", "y", "h.done"),
        scatter,
        fusion("v", "z", "b"),
    )
    return module(*begin, *middle, start, fusion("u", "y", "b"), done, scattered, root)


def settled(room_nbytes: int) -> list[str]:
    plain = step()
    result = settle_pairs(plain, problem_of(plain, backend=GPU), room_nbytes)
    judge(plain, result)
    return [name for name in result.entry.ops if name not in ("a", "b", "w", "out")]


PLAIN = ["g", "h", "x", "g.done", "y", "h.done", "z", "r", "v", "s", "u", "s.done", "r.done"]
LONGEST = ["g", "x", "g.done", "y", "h", "h.done", "z", "r", "v", "s", "u", "s.done", "r.done"]
ALL_BUT_SUMS = ["x", "g", "g.done", "y", "h", "h.done", "z", "r", "r.done", "v", "s", "u", "s.done"]


@pytest.mark.parametrize(
    ("room_nbytes", "order"),
    [(8 * MIB, PLAIN), (7 * MIB, LONGEST), (3 * MIB, ALL_BUT_SUMS), (0, ALL_BUT_SUMS)],
)
def test_what_holds_most_and_longest_is_settled_first(room_nbytes: int, order: list[str]) -> None:
    assert settled(room_nbytes) == order


def test_a_module_whose_pairs_hold_little_stays() -> None:
    plain = step()
    assert settle_pairs(plain, problem_of(plain, backend=GPU), 8 * MIB) is plain
    alone = module("ROOT " + fusion("out", "a", "b"))
    assert settle_pairs(alone, problem_of(alone, backend=GPU), 0) is alone
