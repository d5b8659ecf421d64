"""State in host memory: streamed in and out, the same numbers, donated host to host."""

from __future__ import annotations

import operator
import re
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import memplan
from memplan.errors import MemplanError, PlanMismatchError
from memplan.planning.plan import Plan
from memplan.planning.transforms import inputs_on_host
from memplan.program import compat
from memplan.program.lowerable import Lowerable, as_step
from memplan.program.state.host_state import large_leaves, offload_state, place_argument
from memplan.program.trace import Program, trace
from memplan.request import target_of
from memplan.xla.replay import replay
from tests.arrays import assert_equal, shapes_of
from tests.xla.test_target import needs_compiler

WIDTH, OPTIMIZER = 512, optax.adamw(1e-3)


def start(layers: int = 4) -> Any:
    """Weights and moments; every weight is 1 MiB."""
    keys = jax.random.split(jax.random.key(0), layers)
    weights = [jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5 for key in keys]
    return weights, OPTIMIZER.init(weights)


def train_step(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
    weights, moments = state

    def loss(weights: Any) -> jax.Array:
        y = x
        for weight in weights:
            y = jnp.tanh(y @ weight)
        return jnp.square(y - x).mean()

    value, gradients = jax.value_and_grad(loss)(weights)
    updates, moments = OPTIMIZER.update(gradients, moments, weights)
    return (optax.apply_updates(weights, updates), moments), value


def arguments(layers: int = 4) -> tuple[Any, jax.Array]:
    return start(layers), jax.random.normal(jax.random.key(1), (8, WIDTH))


def program(layers: int = 4) -> Program:
    return trace(train_step, shapes_of(arguments(layers)), {}, {"donate_argnums": 0})


def on_host() -> Program:
    """With the whole state in host memory."""
    return offload_state(program(), large_leaves(program(), (0,)))


def test_large_leaves_of_an_argument_are_held_and_their_updates_return_to_the_host() -> None:
    offloaded = large_leaves(program(), (0,))
    assert len(offloaded) == 3 * 4  # weights and two moments; not the count
    moved = offload_state(program(), offloaded)
    assert len(moved.returned_to_host) == 3 * 4
    assert sum(eqn.primitive.name == "device_put" for eqn in moved.jaxpr.jaxpr.eqns) == 2 * 3 * 4
    assert not large_leaves(program(), (1,))


LARGE = jax.ShapeDtypeStruct((512, 512), jnp.float32)  # 1 MiB


NUMBERS = st.integers(0, 3)


@given(
    st.sets(NUMBERS),
    st.sets(NUMBERS, min_size=1),
    st.permutations(range(4)),
    st.sets(NUMBERS, max_size=2),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_what_jax_aliases_is_in_one_memory(
    donated: set[int], host: set[int], order: list[int], unread: set[int], keep_unused: bool
) -> None:
    """jax pairs arguments and outputs by their types, whatever memory they are in; XLA dies of a pair in two."""

    def step(*arrays: Any) -> Any:
        return [arrays[number] + 1 for number in order if number not in unread]

    options = {"donate_argnums": tuple(donated), "keep_unused": keep_unused}
    traced = trace(step, [LARGE] * 4, {}, options)
    moved = offload_state(traced, large_leaves(traced, host))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # some donated buffers are not usable
        lowered = jax.jit(as_step(moved, moved.jaxpr), **options).lower(*[LARGE] * 4)
    marked = compat.mark_on_host(lowered, moved.on_host).as_text()
    (main,) = (line.partition("->")[0] for line in marked.splitlines() if "@main" in line)
    for argument in main.split("%arg")[1:]:
        alias = re.search(r"tf.aliasing_output = (\d+)", argument)
        if alias:
            assert ("pinned_host" in argument) == (int(alias[1]) in moved.returned_to_host)


def test_arguments_are_counted_as_jit_counts_them() -> None:
    def step(rate: float, state: Any, x: jax.Array) -> Any:
        return state - rate * x

    for options in ({"static_argnums": 0}, {"static_argnames": "rate"}, {"static_argnums": -3}):
        traced = trace(step, (0.5, LARGE, LARGE), {}, options)
        assert large_leaves(traced, (1,)) == {0} and large_leaves(traced, (2,)) == {1}
        with pytest.raises(MemplanError, match="argument 0 cannot be kept"):
            large_leaves(traced, (0,))


@jax.tree_util.register_pytree_node_class
class Picky:
    """A container that does not take what jax describes arrays by."""

    def __init__(self, array: Any):
        if type(array).__name__ == "ArgInfo":
            raise TypeError("no array")
        self.array = array

    def tree_flatten(self) -> Any:
        return (self.array,), None

    @classmethod
    def tree_unflatten(cls, _: Any, leaves: Any) -> Picky:
        return cls(*leaves)


def test_state_in_containers_that_jax_cannot_lower() -> None:
    def step(state: Picky, x: jax.Array) -> Any:
        return Picky(state.array * 2 + x), x.sum()

    state, x = Picky(jnp.ones((512, 512))), jnp.ones((512, 512))
    jitted = memplan.jit(step, host_state=0, donate_argnums=0)
    planned = jitted.plan(state, x)
    assert (
        planned._outcome.program.traced.lowers_by_leaves and planned._outcome.program.on_host == {0}
    )
    state = planned.place(state)
    for expected in (3, 7):
        state, total = planned.compile()(state, x)
        assert state.array.sharding.memory_kind == "pinned_host" and total == 512 * 512
        np.testing.assert_array_equal(state.array, np.full((512, 512), expected))


def test_state_on_the_host_is_planned_for_without_being_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state, x = arguments()
    jitted = memplan.jit(train_step, host_state=0, donate_argnums=0)
    planned = jitted.plan(state, x)
    state = planned.place(state)
    assert jitted.plan(state, x) is planned
    monkeypatch.setattr(jax, "device_put", None)
    again = memplan.jit(train_step, donate_argnums=0, plan=planned.plan).plan(state, x)
    assert again._outcome.program.on_host == planned._outcome.program.on_host
    for leaf in jax.tree.leaves(
        (again._outcome.program.traced.args, again._outcome.program.traced.kwargs)
    ):
        assert getattr(leaf.sharding, "memory_kind", None) != "pinned_host"


def test_nothing_held_changes_nothing() -> None:
    plain = program()
    assert offload_state(plain, ()) is plain


@pytest.mark.parametrize("positions", [{-1}, {99}])
def test_inputs_that_are_not_there_are_refused(positions: set[int]) -> None:
    with pytest.raises(PlanMismatchError, match="Plan again"):
        offload_state(program(), positions)


@pytest.mark.slow
def test_training_with_state_on_the_host_is_training() -> None:
    state, x = arguments()
    planned = memplan.jit(train_step, host_state=0, donate_argnums=0, verify="numbers").plan(
        state, x
    )
    compiled, plain = planned.compile(), jax.jit(train_step, donate_argnums=0)
    device_state, copied = (jax.tree.map(jnp.copy, state) for _ in range(2))
    host_state = planned.place(copied)
    for _ in range(20):
        before = host_state
        device_state, expected_loss = plain(device_state, x)
        host_state, loss = compiled(host_state, x)
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
        large = [leaf for leaf in jax.tree.leaves(host_state) if leaf.nbytes >= 1 << 20]
        kinds = {leaf.sharding.memory_kind for leaf in large}
        assert kinds == {"pinned_host"}
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before) if leaf.nbytes >= 1 << 20)


def test_a_saved_plan_knows_what_is_on_the_host(tmp_path: Path) -> None:
    state, x = arguments()
    plan = memplan.jit(train_step, host_state=0, donate_argnums=0).plan(state, x).plan
    assert len(inputs_on_host(plan.transforms)) == 3 * 4
    plan.save(tmp_path / "plan.json")
    followed = memplan.jit(train_step, plan=Plan.load(tmp_path / "plan.json"), donate_argnums=0)
    assert followed.plan(state, x).plan == plan


def test_a_checkpoint_of_it_loses_nothing(tmp_path: Path) -> None:
    state = place_argument(on_host(), arguments()[0], 0)
    like = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state
    )
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", like)
    shardings = (jax.tree.map(lambda leaf: leaf.sharding, tree) for tree in (state, restored))
    assert jax.tree.all(jax.tree.map(operator.eq, *shardings))
    assert_equal(restored, state)


def test_another_structure_is_not_placed() -> None:
    with pytest.raises(MemplanError, match="leaves"):
        place_argument(on_host(), arguments(3)[0], 0)


@needs_compiler
@pytest.mark.gpu_aot
def test_a_described_gpu_holds_the_state_in_host_memory() -> None:
    target = target_of("v100")
    moved, args = on_host(), shapes_of(arguments())
    step = as_step(moved, moved.jaxpr)
    executable = target.compile(Lowerable(step, args, {}, moved.options, on_host=moved.on_host))
    inputs = moved.jaxpr.jaxpr.invars
    state_nbytes = sum(compat.nbytes_of(inputs[position].aval) for position in moved.on_host)
    # donated host to host: the updates take no more bytes
    assert executable.memory.host_bytes == state_nbytes
    assert executable.compiled.memory_analysis().argument_size_in_bytes < 1 << 20
    on_device = target.compile(Lowerable(train_step, args, {}, moved.options))
    assert on_device.compiled.memory_analysis().argument_size_in_bytes > state_nbytes
    assert on_device.memory.host_bytes == 0


@needs_compiler
@pytest.mark.gpu_aot
@pytest.mark.parametrize("effects", [False, True])
def test_arguments_on_the_host_need_not_be_donated(effects: bool) -> None:
    def averaged(averages: list[jax.Array], x: jax.Array) -> Any:
        if effects:
            jax.debug.print("{}", x.mean(), ordered=True)
        return [0.9 * average + 0.1 * (x.T @ x) for average in averages]

    average = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    x = jax.ShapeDtypeStruct((128, 1024), jnp.float32)
    planned = memplan.jit(averaged, device="v100", host_state=0).plan([average] * 4, x)
    assert planned.report.host_peak_bytes == 4 << 22


@needs_compiler
@pytest.mark.gpu_aot
@pytest.mark.slow
def test_a_state_larger_than_the_device_is_trained() -> None:
    args = shapes_of(arguments(16))
    nbytes = sum(leaf.dtype.itemsize * leaf.size for leaf in jax.tree.leaves(args[0]))
    options = {"host_budget": "1GiB", "host_state": 0, "donate_argnums": 0}
    step = memplan.jit(train_step, budget=nbytes // 2, device="v100", **options)
    report = step.plan(*args).report
    assert report.compiled_peak_bytes <= nbytes // 2
    assert 0 <= nbytes - report.host_peak_bytes < 1 << 20


@needs_compiler
@pytest.mark.gpu_aot
@pytest.mark.slow
def test_state_streams_under_the_computation() -> None:
    x = jax.ShapeDtypeStruct((131072, WIDTH), jnp.float32)
    options = {"host_budget": "1GiB", "host_state": 0, "donate_argnums": 0}
    step = memplan.jit(train_step, budget="3GiB", device="h200", **options)
    planned = step.plan(shapes_of(start(16)), x)
    timeline = replay(planned._outcome.executable.module, target_of("h200").device)
    for stream in ("out", "in"):
        transfers = [transfer for transfer in timeline.transfers if transfer.stream == stream]
        assert sum(transfer.nbytes for transfer in transfers) >= 3 * 16 << 20
    assert timeline.hidden_copy_s > 0.8 * timeline.copy_s
