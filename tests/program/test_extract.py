"""Facts of every operation: FLOPs by hand, bytes of odd types, what may run twice, and where it stands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

from memplan.planning.graph import Graph, Op
from memplan.program.extract import extract
from memplan.program.trace import trace
from tests.program.steps import X


def graph_of(step: Any, *args: Any, **options: Any) -> Graph:
    return extract(trace(step, args, {}, options))


def only(graph: Graph, name: str) -> Op:
    (op,) = [op for op in graph.ops if op.name == name]
    return op


@pytest.mark.parametrize(
    ("spec", "left", "right", "flops"),
    [
        ("ij,jk->ik", (3, 4), (4, 5), 2 * 3 * 4 * 5),
        ("bij,bjk->bik", (2, 3, 4), (2, 4, 5), 2 * 2 * 3 * 4 * 5),
        ("i,i->", (7,), (7,), 2 * 7),
        ("i,j->ij", (7,), (3,), 2 * 7 * 3),
        ("ijk,jkl->il", (2, 3, 4), (3, 4, 5), 2 * 2 * 5 * 12),
    ],
)
def test_flops_of_a_product(spec: str, left: tuple[int, ...], right: tuple[int, ...], flops: float) -> None:
    op = only(graph_of(lambda a, b: jnp.einsum(spec, a, b), jnp.ones(left), jnp.ones(right)), "dot_general")
    assert (op.flops, op.flops_dtype, op.fusion) == (flops, "float32", "kernel")


def test_the_matrix_rate_is_that_of_the_operands() -> None:
    a = jnp.ones((3, 3), jnp.bfloat16)
    op = only(graph_of(lambda a: jnp.matmul(a, a, preferred_element_type=jnp.float32), a), "dot_general")
    assert op.flops_dtype == "bfloat16"


def convolution(groups: int = 1, stride: int = 1, dilation: int = 1) -> Any:
    """8 channels to 12 over 10 x 10 with a 3 x 3 kernel."""

    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(
            x, w, (stride, stride), "SAME", rhs_dilation=(dilation, dilation), feature_group_count=groups
        )

    return step, jnp.ones((2, 8, 10, 10)), jnp.ones((12, 8 // groups, 3, 3))


@pytest.mark.parametrize(("groups", "stride", "dilation"), [(1, 1, 1), (4, 1, 1), (1, 2, 1), (1, 1, 2)])
def test_flops_of_a_convolution(groups: int, stride: int, dilation: int) -> None:
    step, x, w = convolution(groups, stride, dilation)
    positions = 2 * (10 // stride) ** 2
    expected = 2 * positions * 12 * (8 // groups) * 9
    assert only(graph_of(step, x, w), "conv_general_dilated").flops == expected


@pytest.mark.parametrize(("groups", "stride"), [(1, 1), (4, 1), (1, 2), (4, 2)])
def test_both_gradients_of_a_convolution_cost_about_what_it_costs(groups: int, stride: int) -> None:
    step, x, w = convolution(groups, stride)
    forward = only(graph_of(step, x, w), "conv_general_dilated").flops
    ops = graph_of(jax.grad(lambda x, w: step(x, w).sum(), (0, 1)), x, w).ops
    gradients = [op.flops for op in ops if op.name == "conv_general_dilated"]
    assert len(gradients) == 2
    for flops in gradients:
        assert flops == pytest.approx(forward, rel=0.25)  # padding and strides cut off a little


def test_flops_of_loops_and_branches() -> None:
    w = jnp.ones((4, 4))
    scanned = only(graph_of(lambda x: jax.lax.scan(lambda c, _: (c @ w, c.sum()), x, length=5), w), "scan")
    assert scanned.flops == 5 * (2 * 64 + 16)
    assert scanned.flops_dtype == "float32"
    nested = only(
        graph_of(
            lambda x: jax.lax.scan(lambda c, _: (jax.lax.fori_loop(0, 3, lambda i, d: d @ w, c), None), x, length=5), w
        ),
        "scan",
    )
    assert nested.flops == pytest.approx(5 * 3 * 2 * 64, rel=0.02)  # and the counter
    branches = graph_of(lambda x: jax.lax.cond(x[0, 0] > 0, lambda y: y @ w @ w, lambda y: y @ w, x), w)
    assert only(branches, "cond").flops == 2 * 2 * 64


def test_a_loop_is_one_operation_with_a_working_set() -> None:
    def body(carry: jax.Array, _: Any) -> Any:
        wide = jnp.dot(carry[:, None], carry[None, :])  # 100 x 100
        return jnp.dot(wide, carry), None

    op = only(graph_of(lambda x: jax.lax.scan(body, x, length=3)[0], jnp.ones(100)), "scan")
    assert op.workspace_nbytes >= 4 * 100 * 100
    assert op.traffic_nbytes >= 3 * 2 * 4 * 100 * 100
    assert op.fusion == "kernel"


@pytest.mark.parametrize(
    ("dtype", "nbytes"),
    [("float32", 24), ("bfloat16", 12), ("bool", 6), ("uint8", 6), ("int4", 3), ("complex64", 48), ("float8_e5m2", 6)],
)
def test_bytes_by_dtype(dtype: str, nbytes: int) -> None:
    graph = graph_of(lambda x: x.reshape(3, 2), jnp.zeros((2, 3), dtype))
    assert [value.nbytes for value in graph.values] == [nbytes, nbytes]
    assert graph.values[0].dtype == dtype


def test_bytes_of_keys_and_of_nothing() -> None:
    graph = graph_of(jax.random.split, jax.random.key(0))
    assert (graph.values[0].nbytes, graph.nbytes(graph.outputs[0])) == (8, 16)
    assert graph_of(lambda x: x[:0] + 1, jnp.ones((2, 3))).values[-1].nbytes == 0


def test_inputs_outputs_and_constants() -> None:
    table = jnp.ones((3, 4))

    def step(state: Any, x: jax.Array) -> Any:
        y = x @ table
        return state["b"], y, 3.0, y

    graph = graph_of(step, {"a": jnp.ones(2), "b": jnp.ones(5)}, jnp.ones((2, 3)), donate_argnums=0)
    first = [graph.values[value] for value in graph.inputs]
    assert [value.name for value in first] == ["state['a']", "state['b']", "x", "constant:0"]
    assert [value.donated for value in first] == [True, True, False, False]
    assert [value.role for value in first] == ["argument"] * 3 + ["constant"]
    made = graph.ops[0].outputs[0]
    assert graph.outputs == (1, made, made)  # a literal is no value


def test_results_that_nobody_reads_cost_nothing_where_they_can_be_left_out() -> None:
    graph = graph_of(lambda x: jax.lax.sort((x, 2 * x))[0], jnp.ones(100))
    sort = only(graph, "sort")
    assert [graph.nbytes(value) for value in sort.outputs] == [400, 400]  # a kernel writes all that it makes


def note(_: Any) -> np.float32:
    return np.float32(0)


SCALAR = jax.ShapeDtypeStruct((), jnp.float32)


@pytest.mark.parametrize(
    ("step", "name", "why"),
    [
        (lambda x: io_callback(note, SCALAR, x, ordered=True), "io_callback", "effects"),
        (lambda x: io_callback(note, SCALAR, x), "io_callback", "effects"),
        (lambda x: jax.pure_callback(note, SCALAR, x), "pure_callback", "Python"),
        (lambda x: (jax.debug.callback(note, x), x)[1], "debug_callback", "effects"),
        (
            lambda x: jax.lax.scan(lambda c, _: (jax.pure_callback(note, SCALAR, c), None), 0.0, length=2),
            "scan",
            "Python",
        ),
        (lambda x: jax.lax.cond(x[0, 0] > 0, lambda: io_callback(note, SCALAR, x), lambda: 0.0), "cond", "effects"),
        (jax.lax.optimization_barrier, "optimization_barrier", "barrier"),
    ],
)
def test_what_may_run_only_once(step: Any, name: str, why: str) -> None:
    op = only(graph_of(step, jnp.asarray(X)), name)
    assert not op.recomputable
    assert why in op.why_not


def test_everything_else_may_run_again() -> None:
    def step(key: jax.Array, x: jax.Array) -> Any:
        y = jax.random.normal(key, x.shape) + jnp.sort(x) @ jnp.ones((3, 3))
        return jax.lax.fori_loop(0, 2, lambda i, c: c * 2, y), jnp.fft.rfft(y)

    graph = graph_of(step, jax.random.key(0), jnp.asarray(X))
    assert all(op.recomputable and not op.why_not for op in graph.ops)


def test_how_the_compiler_treats_things() -> None:
    graph = graph_of(lambda x: (x.reshape(3, 2), jnp.sin(x), x.sum(), jnp.cumsum(x, 0)), jnp.asarray(X))
    fusions = {op.name: op.fusion for op in graph.ops}
    assert fusions["reshape"] == "view"
    assert fusions["sin"] == "elementwise"
    assert fusions["reduce_sum"] == "reduction"
    assert fusions["cumsum"] == "kernel"


def test_lines_below_the_working_directory_are_short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here = Path(__file__).resolve()
    monkeypatch.chdir(here.parent)
    source = only(graph_of(lambda x: jnp.sin(x), jnp.asarray(X)), "sin").source
    assert source.startswith(f"{here.name}:")
    monkeypatch.chdir(tmp_path)
    assert only(graph_of(lambda x: jnp.cos(x), jnp.asarray(X)), "cos").source.startswith(f"{here}:")


def test_the_fingerprint_tells_programs_apart_and_nothing_else() -> None:
    def step(x: jax.Array) -> jax.Array:
        return jnp.sin(x) @ x

    x = jnp.ones((3, 3))
    same = graph_of(step, x).fingerprint
    assert graph_of(lambda y: jnp.sin(y) @ y, x).fingerprint == same  # names and lines do not matter
    assert graph_of(step, jnp.ones((4, 4))).fingerprint != same
    assert graph_of(step, x.astype(jnp.bfloat16)).fingerprint != same
    assert graph_of(lambda x: jnp.cos(x) @ x, x).fingerprint != same
    assert graph_of(step, x, donate_argnums=0).fingerprint != same
