"""Scans over stacks in host memory give what the scans and updates that they stand for give, in either direction."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memplan.hardware import catalog
from memplan.program import compat
from memplan.program.host_memory import DEVICE, HOST, fetch, write
from memplan.program.lowerable import Lowerable
from memplan.program.state.layerwise import StreamedScan, Update, UpdatingScan
from memplan.xla.target import Target
from tests.arrays import assert_close
from tests.program.loops.test_residuals import copied_in_loops
from tests.xla.thunks import dump_options, dumped_thunks, loops

LAYERS, WIDTH = 4, 3
RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, WIDTH)).astype(np.float32)
W, M = (RNG.normal(size=(LAYERS, WIDTH, WIDTH)).astype(np.float32) for _ in range(2))


def on_host(value: Any) -> Any:
    return jax.device_put(value, HOST)


def on_device(value: Any) -> Any:
    return jax.device_put(value, DEVICE)


def only_scan(closed: compat.ClosedJaxpr) -> compat.JaxprEqn:
    (eqn,) = (eqn for eqn in closed.jaxpr.eqns if eqn.primitive.name == "scan")
    return eqn


def test_a_layer_is_fetched_and_written() -> None:
    def step(stack: jax.Array, layer: jax.Array) -> Any:
        host_stack = on_host(stack)
        return fetch(host_stack, 1), on_device(write([host_stack], [layer], 2)[0])

    fetched, written = jax.jit(step)(W, M[0])
    np.testing.assert_array_equal(fetched, W[1])
    np.testing.assert_array_equal(written, [W[0], W[1], M[0], W[3]])


@pytest.mark.parametrize("reverse", [False, True])
def test_a_streamed_scan_is_the_scan(reverse: bool) -> None:
    def loop(x: jax.Array, w: jax.Array, m: jax.Array) -> Any:
        return jax.lax.scan(
            lambda c, s: (jnp.tanh(c @ s[0]), c.sum() + s[1]), x, (w, m), reverse=reverse
        )

    closed = jax.make_jaxpr(loop)(X, W, M)
    eqn = only_scan(closed)
    assert list(eqn.invars) == list(closed.jaxpr.invars)
    scan = StreamedScan(eqn, {1: eqn.invars[1]})
    results = jax.jit(lambda x, w, m: scan.run([x, on_host(w), m]))(X, W, M)
    assert_close(results, jax.jit(loop)(X, W, M), rtol=1e-6)


def test_a_stack_that_is_read_twice_is_fetched_once() -> None:
    eqn = only_scan(
        jax.make_jaxpr(
            lambda x, w: jax.lax.scan(lambda c, s: (c @ s[0] + s[1].sum(), None), x, (w, w))
        )(X, W)
    )
    scan = StreamedScan(eqn, {1: eqn.invars[1], 2: eqn.invars[2]})
    assert eqn.invars[1] is eqn.invars[2]
    text = str(jax.make_jaxpr(lambda x, w: scan.run([x, w, w]))(X, W))
    assert text.count("dynamic_slice") == 2  # before the loop and in its body


def momentum(w: Any, m: Any, g: Any, rate: Any) -> Any:
    new = 0.9 * m + g
    return w - rate * new, new


def update_of(*args: Any) -> tuple[Update, list[Any], list[Any]]:
    """The whole step as an update whose moments are in place, its arguments and results."""
    jaxpr = jax.make_jaxpr(momentum)(*args).jaxpr
    (w, m, g, rate), (new_w, new_m) = jaxpr.invars, jaxpr.outvars
    numbers, eqns = tuple(range(len(jaxpr.eqns))), tuple(jaxpr.eqns)
    update = Update(numbers, eqns, LAYERS, (w, m), (g,), (rate,), (new_w, new_m), {new_m: m})
    return update, jaxpr.invars, jaxpr.outvars


def test_an_update_layer_by_layer_is_the_update() -> None:
    update, (w, m, g, rate), (new_w, new_m) = update_of(W, M, M, 0.5)
    assert update.invars == [w, m, g, rate]
    assert update.outvars == [new_m, new_w] and update.stacked == [new_w]

    def run(w: jax.Array, m: jax.Array, g: jax.Array, rate: jax.Array) -> Any:
        buffer, stacked = update.run([on_host(w), on_host(m), g, rate])
        return stacked, on_device(buffer)

    assert_close(jax.jit(run)(W, M, 2 * W, 0.5), momentum(W, M, 2 * W, 0.5), rtol=1e-5)


@pytest.mark.gpu_aot
def test_an_update_layer_by_layer_copies_its_layers(tmp_path: Path) -> None:
    stack, rate = (
        jax.ShapeDtypeStruct((LAYERS, 512, 512), jnp.float32),
        jax.ShapeDtypeStruct((), jnp.float32),
    )
    update, *_ = update_of(stack, stack, stack, rate)

    def run(w: jax.Array, m: jax.Array, g: jax.Array, rate: jax.Array) -> Any:
        buffer, stacked = update.run([on_host(w + 1), on_host(m + 1), g, rate])
        return stacked, on_device(buffer)

    target = Target(catalog.named("a100"), described=True)
    target.compile(Lowerable(run, (stack, stack, stack, rate)), dump_options(tmp_path))
    [_] = loops(dumped_thunks(tmp_path))
    assert copied_in_loops(tmp_path) >= 3


@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_that_updates_what_it_reads_is_the_scan_and_the_update(reverse: bool) -> None:
    def step(x: jax.Array, w: jax.Array, m: jax.Array, rate: jax.Array) -> Any:
        def trip(c: jax.Array, layer: jax.Array) -> Any:
            return jnp.tanh(c @ layer), (c.T @ c, c.sum())

        last, (g, sums) = jax.lax.scan(trip, x, w, reverse=reverse)
        return last, sums, *momentum(w, m, g, rate)

    closed = jax.make_jaxpr(step)(X, W, M, 0.5)
    (_, w, m, rate), (last, sums, new_w, new_m) = closed.jaxpr.invars, closed.jaxpr.outvars
    eqn = only_scan(closed)
    eqns = closed.jaxpr.eqns
    numbers = tuple(number for number, _ in enumerate(eqns) if eqns[number] is not eqn)
    update_eqns = tuple(eqns[number] for number in numbers)
    places = {new_w: w, new_m: m}
    stacks, results = (w, m), (new_w, new_m)
    update = Update(
        numbers, update_eqns, LAYERS, stacks, (eqn.outvars[1],), (rate,), results, places
    )
    scan = UpdatingScan(eqn, {1: w}, update)
    assert scan.outvars == [last, sums, new_w, new_m]

    def run(x: jax.Array, w: jax.Array, m: jax.Array, rate: jax.Array) -> Any:
        values = dict(zip(closed.jaxpr.invars, (x, on_host(w), on_host(m), rate), strict=True))
        last, sums, *stacks = scan.run([values[var] for var in scan.invars])
        return last, sums, *map(on_device, stacks)

    assert_close(jax.jit(run)(X, W, M, 0.5), jax.jit(step)(X, W, M, 0.5), rtol=1e-5)
