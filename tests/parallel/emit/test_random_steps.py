"""Random steps on 2 to 8 simulated devices, each against the same step on one."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from memplan.parallel.step import data_parallel
from memplan.program.ops.record import RECORDS, Primitive
from tests.parallel.emit import operations
from tests.parallel.emit.operations import Op
from tests.parallel.emit.random_steps import Drawn, drawn_step
from tests.parallel.simulator.simulated import alone, equations, mesh, raw, simulated

HITS = 3  # of every rule
RULES = {name for name, known in RECORDS.items() if known.axes is not Primitive.axes}
SHAPED, ELEMENTWISE = 4, 5  # steps for each operation, and for each group of elementwise ones
GROUP = 8

Case = tuple[Mapping[str, Op], bool]


def cases() -> Iterator[Any]:
    """Operations, and whether exactly: elementwise ones in groups, each of the others by itself."""
    exact = {**operations.ELEMENTWISE, **operations.ELEMENTWISE_EXACT}
    for ops, how in ((exact, True), (operations.ELEMENTWISE_SMOOTH, False)):
        for names in _groups(ops):
            yield pytest.param({name: ops[name] for name in names}, how, ELEMENTWISE, id=f"{names[0]} to {names[-1]}")
    for ops, how in ((operations.SHAPED, None), (operations.SHAPED_EXACT, True), (operations.SHAPED_SMOOTH, False)):
        for name, op in ops.items():
            yield pytest.param({name: op}, how, SHAPED, id=name)


def _groups(ops: Mapping[str, Op]) -> Iterator[list[str]]:
    names = list(ops)
    for start in range(0, len(names), GROUP):
        yield names[start : start + GROUP]


@pytest.mark.parametrize(("ops", "exact", "count"), list(cases()))
def test_a_divided_step_is_that_of_one_device(ops: Mapping[str, Op], exact: bool | None, count: int) -> None:
    divided: Counter[str] = Counter()

    @seed(1)  # with it every rule has its hits
    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=HealthCheck)
    @given(st.binary(min_size=64, max_size=64))
    def check(numbers: bytes) -> None:
        drawn = drawn_step(numbers, ops, numbers[-1] % 2 == 0 if exact is None else exact)
        divided.update(compared(drawn))

    check()
    assert {name: divided[name] for name in ops if name in RULES and divided[name] < HITS} == {}


def compared(drawn: Drawn) -> Iterator[str]:
    """The names of the equations that were divided, once the results are found to be the same."""
    args = drawn.state, drawn.batch
    options = {"batch_axis": drawn.batch_axis, "split_state": "moments" if drawn.split_state else None}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* cannot be divided along the batch as it lies")
        divided = data_parallel(drawn.step, mesh(drawn.sizes), **options)
        found = simulated(divided, *args)
    pairs = zip(*map(jax.tree.leaves, (alone(drawn.step, *args), found)), strict=True)
    for expected, one in pairs:
        same(raw(expected), raw(one), drawn.exact)
    return (eqn.primitive.name for eqn, one in equations(divided.divided(args).sharded) if one.axis is not None)


def same(expected: np.ndarray, found: np.ndarray, exact: bool) -> None:
    assert (expected.shape, expected.dtype) == (found.shape, found.dtype)
    if exact:
        np.testing.assert_array_equal(found, expected)
    else:
        largest = float(np.abs(expected).max(initial=1.0))
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4 * largest)


def test_every_rule_is_tried() -> None:
    tried: Sequence[Mapping[str, Op]] = [
        operations.ELEMENTWISE, operations.ELEMENTWISE_EXACT, operations.ELEMENTWISE_SMOOTH,
        operations.SHAPED, operations.SHAPED_EXACT, operations.SHAPED_SMOOTH,
    ]  # fmt: skip
    assert set(RULES) - {"banded", "squares_about_mean"} <= set().union(*tried)  # those are in slabs alone


@pytest.mark.slow
def test_fifty_steps_on_eight_devices() -> None:
    module = "tests.parallel.emit.on_devices"
    done = subprocess.run([sys.executable, "-m", module, "50"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 50 and {seed: off for seed, off in found.items() if not off <= 1} == {}
