"""`pin`: values with a name are where the user says, in every form of a step, and what cannot be is told."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import memplan
from memplan.compilation.outcome import Outcome
from memplan.errors import MemplanError, UnsupportedProgramError
from memplan.planning.schedule import Kind
from memplan.stages import Planned

Layer = Callable[[jax.Array, jax.Array], jax.Array]
Built = tuple[Callable[..., Any], tuple[Any, ...]]
LAYERS, ROWS, WIDTH = 4, 2048, 64


def dense(x: jax.Array, w: jax.Array) -> jax.Array:
    return checkpoint_name(jnp.tanh(x @ w), "h")


def called(x: jax.Array, w: jax.Array) -> jax.Array:
    """The name is inside of a jitted function, of what the function is given."""
    return jax.jit(lambda y: checkpoint_name(y, "h"))(jnp.tanh(x @ w))


def named_outside(x: jax.Array, w: jax.Array) -> jax.Array:
    """What makes the value is inside of a jitted function."""
    return checkpoint_name(jax.jit(lambda x: jnp.tanh(x @ w))(x), "h")


def named_twice(x: jax.Array, w: jax.Array) -> jax.Array:
    return checkpoint_name(checkpoint_name(jnp.tanh(x @ w), "h"), "other")


def through_library(x: jax.Array, w: jax.Array) -> jax.Array:
    """`jax.nn.silu` is a jitted function, and calls one."""
    return checkpoint_name(jax.nn.silu(x @ w), "h")


def training(layer: Layer, scan: bool = False) -> Built:
    def loss(weights: Any, x: jax.Array) -> jax.Array:
        if scan:
            x = lax.scan(lambda x, w: (layer(x, w), None), x, jnp.stack(weights))[0]
        else:
            for w in weights:
                x = layer(x, w)
        return (x * x).sum()

    def step(weights: Any, x: jax.Array) -> Any:
        value, gradient = jax.value_and_grad(loss)(weights, x)
        return jax.tree.map(lambda w, g: w - 1e-4 * g, weights, gradient), value

    keys = jax.random.split(jax.random.key(0), LAYERS + 1)
    weights = [jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5 for key in keys[1:]]
    return step, (weights, jax.random.normal(keys[0], (ROWS, WIDTH)))


def fate(planned: Planned, name: str) -> Counter[tuple[str, bool, bool]]:
    """Of the buffers with a pin: where they should be, whether they are copied, and whether they are made again."""
    outcome = planned._outcome
    assert isinstance(outcome, Outcome)
    problem, schedule = outcome.planned.base.problem, outcome.planned.schedule
    ran = Counter(action.number for action in schedule if action.kind is Kind.RUN)
    copied = {action.number for action in schedule if action.kind is Kind.OFFLOAD}
    return Counter(
        (
            buffer.pin.where.value,
            number in copied,
            buffer.maker is not None and ran[buffer.maker] > 1,
        )
        for number, buffer in enumerate(problem.buffers)
        if buffer.pin is not None and buffer.pin.name == name
    )


def plain_bytes(step: Callable[..., Any], args: Any) -> int:
    nbytes = memplan.jit(step, device="a100").plan(*args).report.baseline_peak_bytes
    assert nbytes is not None
    return nbytes


HOST, RECOMPUTE, DEVICE = (
    ("host", True, False),
    ("recompute", False, True),
    ("device", False, False),
)


@pytest.mark.gpu_aot
@pytest.mark.parametrize(
    ("layer", "share", "fates"),
    [
        (dense, None, [DEVICE]),
        (dense, 0.8, [HOST, RECOMPUTE]),
        *((layer, None, [HOST, RECOMPUTE]) for layer in (called, named_outside, named_twice)),
        (through_library, None, [HOST, RECOMPUTE]),
    ],
)
def test_kernels_keep_pins_whatever_the_budget(layer: Layer, share: Any, fates: Any) -> None:
    """Each fate: the place that is asked for, whether values are copied, whether made again."""
    step, args = training(layer)
    options: dict[str, Any] = {"device": "a100", "split": False}
    if share is not None:
        options["budget"] = int(share * plain_bytes(step, args))
        with pytest.raises(memplan.InfeasibleBudgetError, match="pin"):
            memplan.jit(step, pin={"h": "device"}, **options).plan(*args)
    for where, copied, again in fates:
        planned = memplan.jit(step, pin={"h": where}, **options).plan(*args)
        # the last is read by the loss at once, and its gradient by the next kernel
        counts = fate(planned, "h")
        assert counts[where, copied, again] >= LAYERS - 2, counts
        assert counts.total() - counts[where, copied, again] <= 1
        (row,) = planned.report.pins
        assert (row.name, row.where, row.values) == ("h", where, counts.total())
        compiled_bytes = planned.report.compiled_peak_bytes or 0
        assert 0 <= planned.report.predicted_peak_bytes - compiled_bytes < 256


def named_loop() -> Built:
    """A scan that names what a trip makes, and what it is given by the trip before."""

    def layer(x: jax.Array, w: jax.Array) -> jax.Array:
        x = checkpoint_name(x, "given")
        return jnp.sin(checkpoint_name(jnp.tanh(x @ w), "made") @ w)

    return training(layer, scan=True)


@pytest.fixture(scope="module")
def bytes_of_loop() -> int:
    return plain_bytes(*named_loop())


@pytest.mark.gpu_aot
@pytest.mark.parametrize(
    ("name", "where", "decision", "share"),
    [
        ("made", "host", "offload", 1.0),
        ("made", "recompute", "recompute", 1.0),
        pytest.param("made", "device", "keep", 0.8, marks=pytest.mark.slow),
        ("given", "host", "offload", 0.8),
        pytest.param("given", "device", "keep", 0.8, marks=pytest.mark.slow),
        pytest.param("made", "recompute", "recompute", 0.8, marks=pytest.mark.slow),
    ],
)
def test_stacks_of_loops_keep_pins(
    name: str, where: str, decision: str, share: float, bytes_of_loop: int
) -> None:
    step, args = named_loop()
    budget = int(share * bytes_of_loop)
    jitted = memplan.jit(step, device="a100", budget=budget, split=False, pin={name: where})
    report = jitted.plan(*args).report
    assert report.pins[0].values == 1 and report.pins[0].nbytes == LAYERS * ROWS * WIDTH * 4
    rows = [row for row in report.decisions if " trips" in row.name]
    if name == "made":
        assert [row.decision for row in rows if row.name.startswith("tanh")] == [decision]
    else:
        names = ("name", "operands")
        assert decision in [row.decision for row in rows if row.name.startswith(names)]
    assert (report.host_peak_bytes > 0) >= (where == "host")


def test_here_the_same_bits_and_a_plan_that_is_followed(tmp_path: Path) -> None:
    step, args = training(dense)
    wanted = jax.tree.leaves(jax.jit(step)(*args))
    planned = memplan.jit(step, pin={"h": "recompute"}).plan(*args)
    assert (
        planned.report.recomputations_found
        and fate(planned, "h")["recompute", False, True] >= LAYERS - 2
    )
    assert all(map(np.array_equal, wanted, jax.tree.leaves(planned.compile()(*args))))
    planned.plan.save(tmp_path / "plan.json")
    followed = memplan.jit(step, plan=memplan.Plan.load(tmp_path / "plan.json")).plan(*args)
    assert followed.report.pins == planned.report.pins
    assert fate(followed, "h") == fate(planned, "h")
    # on a CPU, the host's memory is the device's
    assert memplan.jit(step, pin={"h": "host"}).plan(*args).report.pins[0].where == "device"


@pytest.mark.parametrize(
    ("pin", "message"),
    [
        ({"q": "host"}, r"no value of the step is named 'q'.*it names 'h'"),
        ({"h": "gpu"}, r"'h' is pinned to 'gpu'; it is one of 'device', 'host', 'recompute'"),
        ({"h": ["host"]}, r"'h' is pinned to \['host'\]"),
    ],
)
def test_a_pin_that_makes_no_sense(pin: Any, message: str) -> None:
    step, args = training(dense)
    with pytest.raises(MemplanError, match=message):
        memplan.jit(step, pin=pin).plan(*args)


def test_a_step_that_names_nothing() -> None:
    with pytest.raises(MemplanError, match="it names none"):
        memplan.jit(lambda x: x + 1, pin={"h": "host"}).plan(jnp.ones(3))


def test_the_steps_own_checkpoints_are_carried_out() -> None:
    def layer(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sin(checkpoint_name(jnp.tanh(x @ w), "h")) @ w

    step, args = training(jax.checkpoint(layer))
    with pytest.raises(
        UnsupportedProgramError,
        match=r"own jax.checkpoint computes 'h' again \(tests/test_pins.py:",
    ):
        memplan.jit(step, pin={"h": "device"}).plan(*args)
    report = memplan.jit(step, pin={"h": "recompute"}).plan(*args).report
    assert report.checkpoints and all("tests/test_pins.py:" in line for line in report.checkpoints)
    assert "as written" in str(report)
    saved = jax.checkpoint(layer, policy=jax.checkpoint_policies.save_only_these_names("h"))
    step, args = training(saved)
    assert memplan.jit(step, pin={"h": "device"}).plan(*args).report.pins[0].values >= LAYERS - 2


@pytest.mark.gpu_aot
def test_a_pin_that_nothing_can_keep() -> None:
    step, args = training(dense)
    with pytest.raises(UnsupportedProgramError, match=r"'h' to 'host'.*host budget"):
        memplan.jit(step, device="v100", host_budget=0, pin={"h": "host"}).plan(*args)
