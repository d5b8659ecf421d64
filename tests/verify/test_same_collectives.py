"""The judge of shaped collectives accepts compositions that are equal to a collective, and kills every mutant."""

from collections.abc import Callable

import pytest

from memplan.verify.dataflow import NotThePlainModuleError
from memplan.verify.same_collectives import judge_shaped
from memplan.xla.module import Module, read_module
from tests.verify import shaped_modules as modules
from tests.verify.compositions import across, inside
from tests.verify.shaped_modules import Pair
from tests.verify.shaped_mutants import MUTANTS

ACCEPTED: dict[str, Callable[[], Pair]] = {
    "sums scattered, 2x4": lambda: modules.scattered_sums(inside(2, 4), across(2, 4)),
    "sums scattered, 3x4": lambda: modules.scattered_sums(inside(3, 4), across(3, 4)),
    "sums scattered, 2x2x2": lambda: modules.scattered_sums(
        [[0, 1], [2, 3], [4, 5], [6, 7]], [[0, 2], [1, 3], [4, 6], [5, 7]], [[0, 4], [1, 5], [2, 6], [3, 7]]
    ),
    "sums twice": lambda: modules.sums_twice(2, 4),
    "sums in two buckets": lambda: modules.two_buckets(2, 4),
    "sums of permuted groups": modules.permuted_sums,
    "sums over a part of an axis": modules.sums_over_a_part,
    "a tuple of sums": modules.tuple_of_sums,
    "sums by adds": lambda: modules.added_sums(2, 4),
    "sums sent": lambda: modules.sent_sums(2, 4),
    "sums sent, 3x4": lambda: modules.sent_sums(3, 4),
    "sums sent by tuples": lambda: modules.sent_sums(2, 4, tuples=True),
    "gathers, 2x4": lambda: modules.gathers(2, 4),
    "gathers, 3x4": lambda: modules.gathers(3, 4),
    "scatters, 2x4": lambda: modules.scatters(2, 4),
    "scatters, 3x4": lambda: modules.scatters(3, 4),
    "a sum behind a loop": modules.sum_behind_a_loop,
    "a sum behind a loop in phases": lambda: modules.sum_behind_a_loop(in_phases=True),
    "a sum in a loop": modules.sum_in_a_loop,
}


def read(text: str) -> Module:
    return read_module(text, scheduled=False)


def judge(pair: Pair) -> None:
    judge_shaped(read(pair.plain), read(pair.shaped), pair.partitions, pair.wire)


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepts_compositions(name: str):
    judge(ACCEPTED[name]())


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepts_the_plain_module(name: str):
    pair = ACCEPTED[name]()
    judge_shaped(read(pair.plain), read(pair.plain), pair.partitions, pair.wire)
    judge_shaped(read(pair.plain), read(pair.plain), pair.partitions, "bf16")


@pytest.mark.parametrize("name", MUTANTS)
def test_kills(name: str):
    pair = MUTANTS[name]()
    judge_shaped(read(pair.plain), read(pair.plain), pair.partitions, pair.wire)
    with pytest.raises(NotThePlainModuleError):
        judge(pair)


def test_there_are_many_mutants():
    assert len(MUTANTS) == 83
