"""What jax's jaxprs say: names, sizes, lines, bodies."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from memplan.program import compat
from memplan.program.trace import trace


def test_names_are_paths_without_the_static_arguments() -> None:
    def step(mode: str, state: Any, x: Any, *args: Any, k: Any) -> Any:
        return state["w"] * x + k + args[0]

    program = trace(
        step, ("fast", {"w": 1.0, "b": 2.0}, 3.0, 4.0), {"k": 5.0}, {"static_argnums": 0}
    )
    names = "state['b']", "state['w']", "x", "args[0]", "k"
    assert compat.input_names(program.traced.jaxpr) == names


def test_outputs_have_paths_too() -> None:
    closed = jax.make_jaxpr(lambda x: (x, {"loss": x + 1, "rest": [x, None]}))(1.0)
    assert compat.output_names(closed) == ("result[0]", "result[1]['loss']", "result[1]['rest'][0]")


def test_sizes_of_odd_types() -> None:
    sizes = {
        "bool": 9,
        "int4": 5,
        "int2": 3,
        "uint8": 9,
        "bfloat16": 18,
        "float8_e4m3fn": 9,
        "complex64": 72,
    }
    for name, nbytes in sizes.items():
        assert compat.nbytes_of(jax.ShapeDtypeStruct((3, 3), jnp.dtype(name))) == nbytes
    assert compat.nbytes_of(jax.typeof(jax.random.key(0))) == 8
    assert compat.nbytes_of(jax.typeof(jax.random.split(jax.random.key(0, impl="rbg"), 3))) == 48
    assert compat.nbytes_of(jax.ShapeDtypeStruct((3,), jax.dtypes.float0)) == 0


def test_a_nested_jit_with_shardings_is_not_merely_a_call() -> None:
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    sine = jax.jit(jnp.sin), jax.jit(jnp.sin, out_shardings=device)
    plain, placed = jax.make_jaxpr(lambda x: [jitted(x) for jitted in sine])(1.0).eqns
    assert compat.call_body(plain) is not None and compat.call_body(placed) is None


def test_only_a_differentiated_checkpoint_that_forbids_cse_needs_a_barrier() -> None:
    def remats(function: Any, **options: Any) -> list[compat.JaxprEqn]:
        closed = jax.make_jaxpr(
            function(lambda x: jax.checkpoint(lambda y: jnp.sin(jnp.sin(y)), **options)(x))
        )(1.0)
        return [
            eqn
            for eqn in closed.jaxpr.eqns
            if eqn.params.keys() >= {"prevent_cse", "differentiated"}
        ]

    assert list(map(compat.needs_barrier, remats(jax.grad))) == [True]
    assert list(map(compat.needs_barrier, remats(jax.grad, prevent_cse=False))) == [False]
    assert list(map(compat.needs_barrier, remats(lambda function: function))) == [False]


def scan(reverse: bool = False) -> compat.Scan:
    def loop(shared: jax.Array, carry: jax.Array, xs: jax.Array) -> Any:
        return jax.lax.scan(lambda c, x: (c + shared, c * x), carry, xs, reverse=reverse, unroll=3)

    (eqn,) = jax.make_jaxpr(loop)(1.0, 2.0, jnp.ones(6)).jaxpr.eqns
    equation_scan = compat.scan_of(eqn)
    assert equation_scan is not None
    return equation_scan


def test_a_scan_has_constants_carries_and_stacks() -> None:
    loop = scan()
    assert (loop.consts, loop.carries, loop.trips, loop.reverse, loop.unroll) == (1, 1, 6, False, 3)
    assert loop.split("abc") == (["a"], ["b"], ["c"])


def test_what_is_fetched_ahead_is_the_next_trips_slice() -> None:
    assert scan().following.tolist() == [1, 2, 3, 4, 5, 5]
    assert scan(reverse=True).following.tolist() == [0, 0, 1, 2, 3, 4]


def test_a_scan_runs_with_another_body() -> None:
    for reverse in (False, True):
        results = scan(reverse).run(
            lambda shared, c, x: [c + shared, x], [jnp.array(1.0), jnp.array(2.0), jnp.arange(6.0)]
        )
        assert results[0] == 8 and results[1].tolist() == list(range(6))


def test_paths_below_the_working_directory_are_relative(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert compat.relative(f"{tmp_path}/a/net.py:3") == "a/net.py:3"
    assert compat.relative(f"{tmp_path}er/net.py:3") == f"{tmp_path}er/net.py:3"


@pytest.mark.parametrize(
    "wrong",
    [
        {"batch_group_count": 3},
        {"feature_group_count": 2},
        {"padding": ((0, 0),)},
        {"rhs_dilation": (1, 0)},
    ],
)
def test_jax_checks_what_is_bound_before_xla_sees_it(wrong: Any) -> None:
    x, w = jnp.ones((4, 7, 5, 2)), jnp.ones((3, 2, 2, 6))
    numbers = ("NHWC", "HWIO", "NHWC")
    (eqn,) = jax.make_jaxpr(
        lambda *xs: jax.lax.conv_general_dilated(*xs, (1, 1), "SAME", (1, 1), (1, 1), numbers)
    )(x, w).eqns
    broken = eqn.replace(params={**eqn.params, **wrong})
    for bind in (
        compat.bind,
        lambda eqn, operands: jax.make_jaxpr(lambda *xs: compat.bind(eqn, xs))(*operands),
    ):
        with pytest.raises((TypeError, ValueError)):
            bind(broken, [x, w])
        with pytest.raises((TypeError, ValueError)):
            bind(eqn, [x, jnp.ones((3, 2, 3, 6))])
