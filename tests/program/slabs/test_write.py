"""Programs in loops over slabs compute what they computed: random ones, and those that people want in slabs."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax import lax

from memplan.errors import PlanMismatchError
from memplan.planning.slabs.slabs import LoopOverSlabs, Slabs, least_rows, slab_rows, wide_levels
from memplan.program import compat
from memplan.program.flat import Flat, flatten
from memplan.program.interpret import interpret
from memplan.program.slabs.axis import SlabAxis
from memplan.program.slabs.write import axis_at, follow_slabs, in_slabs, with_slabs
from memplan.program.trace import Program, trace
from tests.arrays import assert_close, assert_equal, assert_near
from tests.program.slabs.slab_programs import CUTS, Cut, Layer, Step, loops_of, slab_programs

# compiled once, run once
_QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def results(programs: Sequence[compat.ClosedJaxpr], args: Sequence[Any]) -> list[list[np.ndarray]]:
    """By program; compiled in one go, which is quicker."""
    lowered = jax.jit(lambda args: [interpret(closed, args) for closed in programs]).lower(
        list(args)
    )
    return [[*map(np.asarray, each)] for each in lowered.compile(_QUICK)(list(args))]


Results = list[np.ndarray]


def without_and_with_slabs(step: Step, cut: Cut) -> tuple[Results, Results] | None:
    """Results without slabs and with them; None where nothing can be in any."""
    closed, args = step.flat_and_operands()
    axis_and_slabs = cut.of(Flat(closed))
    if axis_and_slabs is None:
        return None
    plain, split = results([closed, in_slabs(*axis_and_slabs)], args)
    for array, expected in zip(split, plain, strict=True):
        assert (array.shape, array.dtype) == (expected.shape, expected.dtype)
    return plain, split


def wide_and_moved(axis: SlabAxis, slabs: Slabs) -> Iterator[compat.ClosedJaxpr]:
    """In slabs, and with all that is written on the host, of a part of it rows on the device."""
    yield in_slabs(axis, with_wide_loops(axis, slabs))
    written = frozenset(value for loop in loops_of(axis, slabs) for value in loop.writes)
    on_host = replace(slabs, on_host=written)
    split = replace(on_host, on_device=some_rows(axis, on_host))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(compat, "empty", anything)
        moved = in_slabs(axis, with_wide_loops(axis, split))
    yield moved


def check_exact(step: Step, cut: Cut) -> None:
    """In slabs, and with all that is written on the host, between spare rows of anything.

    Of every other value, the first rows of each slab are on the device. Every other loop takes several slabs in a trip.
    """
    closed, args = step.flat_and_operands()
    axis_and_slabs = cut.of(Flat(closed))
    if axis_and_slabs is not None:
        plain, *variants = results([closed, *wide_and_moved(*axis_and_slabs)], args)
        types = [(array.shape, array.dtype) for array in plain]
        for variant in variants:
            assert [(array.shape, array.dtype) for array in variant] == types
            assert_equal(variant, plain)


def some_rows(axis: SlabAxis, slabs: Slabs) -> frozenset[tuple[int, int]]:
    """Of every other value on the host, first rows of each slab: one, two, ..., all but one."""
    rows = {value: slab_rows(axis.graph, slabs, value) for value in sorted(slabs.on_host)[::2]}
    return frozenset((value, 1 + value % (count - 1)) for value, count in rows.items() if count > 1)


def with_wide_loops(axis: SlabAxis, slabs: Slabs) -> Slabs:
    """Every other loop that may take several slabs in a trip takes two to four."""
    levels = sorted(wide_levels(slabs, loops_of(axis, slabs)))[::2]
    return replace(slabs, at_once=frozenset((level, 2 + level % 3) for level in levels))


def anything(shape: tuple[int, ...], dtype: Any, space: jax.memory.Space) -> Any:
    fill = jnp.nan if jnp.issubdtype(dtype, jnp.floating) else -77
    return jax.device_put(jnp.full(shape, fill, dtype), space)


def distance(arrays: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    """The greatest difference, by the greatest number of its array or a hundredth of that of all arrays."""
    wide = ([array.astype(np.float64) for array in side] for side in (arrays, expected))
    pairs = list(zip(*wide, strict=True))
    top = max((np.abs(a).max() for a, _ in pairs), default=0.0) / 100 + 1e-9
    return max((np.abs(a - b).max() / max(np.abs(a).max(), top) for a, b in pairs), default=0.0)


def check_close(step: Step, cut: Cut, within: float) -> None:
    variants = with_other_numbers(step)
    results_of = (without_and_with_slabs(variant, cut) or ([], []) for variant in variants)
    assert any(distance(*both) <= within for both in results_of)


def with_other_numbers(step: Step) -> Iterator[Step]:
    """At a tie of a ReLU or a maximum rounding decides, and that is rare."""
    yield from (step._replace(seed=step.seed + offset) for offset in (0, 1000, 2000))


def in_float32(step: Step) -> list[np.ndarray]:
    """What the step without slabs computes in float32, from the same operands."""
    closed, _ = step._replace(dtype="float32").flat_and_operands()
    return results(
        [closed], [operand.astype(np.float32) for operand in step.flat_and_operands()[1]]
    )[0]


def off_by(step: Step, cut: Cut) -> tuple[float, float]:
    """The distance from what float32 computes, without slabs and with them."""
    both_results = without_and_with_slabs(step, cut)
    if both_results is None:
        return 0.0, 0.0
    wide = in_float32(step)
    return distance(wide, both_results[0]), distance(wide, both_results[1])


def check_halves(step: Step, cut: Cut, within: float) -> None:
    """Not that much farther from what float32 computes: where sums of halves are far from it, those of slabs are not.

    They are carried in float32. Of 480 halves, those of an upsampled image's gradient, XLA's own lose a tenth.
    """
    distances = (off_by(variant, cut) for variant in with_other_numbers(step))
    assert any(split <= plain + within for plain, split in distances)


_UPSAMPLED = Step(
    batch=1, space=(3, 5, 4), features=2,
    layers=tuple(
        Layer(kind, size=3, stride=1, dilation=1, groups=1, features=2, valid=False, back=0)
        for kind in ("convolution", "upsample", "norm")
    ),
    loss="squares", exact=False, dtype="bfloat16", gradient="weights", seed=0,
)  # fmt: skip


EXACT = slab_programs(exact=True, dtypes=("float32", "float32", "int32"))


@pytest.mark.parametrize("examples", [4, pytest.param(40, marks=pytest.mark.slow)])
def test_whole_numbers_are_the_same_to_the_bit(examples: int) -> None:
    settings(max_examples=examples)(given(EXACT, CUTS)(check_exact))()


@pytest.mark.parametrize(
    ("examples", "layers"), [(3, 4), pytest.param(40, 6, marks=pytest.mark.slow)]
)
def test_any_numbers_are_the_same_but_for_rounding(examples: int, layers: int) -> None:
    steps = slab_programs(layers=layers)
    settings(max_examples=examples)(given(steps, CUTS, st.just(2e-4))(check_close))()


@given(slab_programs(layers=3, dtypes=("bfloat16", "float16")), CUTS)
@example(_UPSAMPLED, Cut(value=0, dim=0, slabs=3, theta=1, stored=None))
@settings(max_examples=2)
def test_halves_are_the_same_but_for_their_rounding(step: Step, cut: Cut) -> None:
    check_halves(step, cut, 0.06)


def gradients(function: Callable[..., Any], count: int) -> Callable[..., Any]:
    """The loss, and its gradients of the first arguments."""
    return jax.value_and_grad(function, argnums=tuple(range(count)))


def normals(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def everything(
    function: Callable[..., Any], args: Sequence[Any], shape: tuple[int, ...], dim: int, rows: int
) -> tuple[compat.ClosedJaxpr, SlabAxis, Slabs]:
    """All that can be in slabs of so many rows of the first array of a shape, nothing stored."""
    closed = flatten(jax.make_jaxpr(function)(*args))
    value = next(
        number for number, var in enumerate(Flat(closed).values) if var.aval.shape == shape
    )
    axis = axis_at(Flat(closed), value, dim)
    ops = frozenset(axis.graph.along)
    assert rows % least_rows(axis.graph, ops) == 0
    return closed, axis, Slabs(value, dim, rows, ops, frozenset(), frozenset())


def never_whole(axis: SlabAxis, slabs: Slabs, shape: tuple[int, ...]) -> bool:
    """Some arrays of a shape are made in loops, none outside, and no loop reads or writes one."""
    graph = axis.graph.graph
    loops = loops_of(axis, slabs)
    of_shape = {value for value, array in enumerate(graph.values) if array.shape == shape}
    makers = {number for number, op in enumerate(graph.ops) if of_shape.intersection(op.outputs)}
    crossing = {
        graph.values[value].shape for loop in loops for value in (*loop.reads, *loop.writes)
    }
    return bool(makers) and makers <= slabs.ops and shape not in crossing


def assert_same_numbers(
    closed: compat.ClosedJaxpr, axis: SlabAxis, slabs: Slabs, args: Any, within: float = 1e-5
) -> None:
    plain, split = results([closed, in_slabs(axis, slabs)], jax.tree.leaves(args))
    assert_near(split, plain, within)


def check_never_whole(
    function: Callable[..., Any], args: Sequence[Any], shape: tuple[int, ...], dim: int, rows: int
) -> tuple[SlabAxis, list[LoopOverSlabs]]:
    """No array of this shape exists in slabs, and the results are the same; the loops."""
    closed, axis, slabs = everything(function, args, shape, dim, rows)
    assert never_whole(axis, slabs, shape)
    assert_same_numbers(closed, axis, slabs, args)
    return axis, loops_of(axis, slabs)


def token_loss(hidden: Any, table: Any, labels: Any) -> Any:
    logs = jax.nn.log_softmax(hidden @ table)
    return -jnp.take_along_axis(logs, labels[:, None], -1).mean()


def test_logits_never_exist_for_the_loss_of_tokens_and_its_gradient() -> None:
    """In one loop: 13 tokens in slabs of 4."""
    args = normals(13, 3), normals(3, 17, seed=1), jnp.arange(13) % 17
    axis, (loop,) = check_never_whole(gradients(token_loss, 2), args, (13, 17), 0, 4)
    # the gradient of `hidden`
    assert [axis.graph.graph.values[value].shape for value in loop.writes] == [(13, 3)]
    assert len(loop.sums) == 2  # the loss, the gradient of the table


def test_a_wide_layer_never_exists() -> None:
    def loss(x: Any, into: Any, out: Any) -> Any:
        return jnp.square(x + jax.nn.gelu(x @ into) @ out).mean()

    args = normals(10, 3), normals(3, 64, seed=1), normals(64, 3, seed=2)
    _, (_,) = check_never_whole(gradients(loss, 3), args, (10, 64), 0, 3)


def attention(q: Any, k: Any, v: Any) -> Any:
    return jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k)) @ v


def test_attention_by_rows_of_queries_has_the_scores_of_a_slab_alone() -> None:
    """Keys and values are read whole; their gradients are sums over rows of queries."""

    def loss(q: Any, k: Any, v: Any) -> Any:
        return jnp.square(attention(q, k, v)).sum()

    args = normals(2, 11, 3), normals(2, 9, 3, seed=1), normals(2, 9, 3, seed=2)
    axis, (loop,) = check_never_whole(gradients(loss, 3), args, (2, 11, 9), 1, 4)
    assert [axis.flat.values[value] for value in loop.reads] == [axis.flat.invars[0]]
    values, ops = axis.graph.graph.values, axis.graph.graph.ops
    summed = [values[value].shape for op in loop.sums for value in ops[op].outputs]
    assert sorted(summed) in ([(), (2, 3, 9), (2, 9, 3)], [(), (2, 9, 3), (2, 9, 3)])


def test_attention_of_tokens_to_one_another() -> None:
    """Rows of tokens are rows of queries, and keys that are read whole: made in a loop before."""

    def loss(x: Any, w: Any) -> Any:
        return jnp.square(attention(x @ w[0], x @ w[1], x @ w[2])).sum()

    args = normals(2, 11, 3), normals(3, 3, 3, seed=1)
    check_never_whole(gradients(loss, 2), args, (2, 11, 11), 1, 4)


@pytest.mark.parametrize(
    "method", ["linear", "nearest", pytest.param("cubic", marks=pytest.mark.slow)]
)
def test_logits_that_are_resized_to_the_image_never_exist(method: str) -> None:
    """In one loop, forward and backward: three times as many rows as features have, and their neighbours'."""

    def loss(w: Any, x: Any, labels: Any) -> Any:
        logits = jax.image.resize(x @ w, (1, 24, 12, 5), method)
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1).mean()

    args = normals(3, 5), normals(1, 8, 6, 3, seed=1), jnp.arange(288).reshape(1, 24, 12) % 5
    closed, axis, slabs = everything(
        jax.value_and_grad(loss, argnums=(0, 1)), args, (1, 24, 12), 1, 6
    )
    names = [op.name for op in axis.graph.graph.ops]
    (loop,) = loops_of(axis, slabs)
    assert never_whole(axis, slabs, (1, 24, 12, 5)) and not axis.blocked
    assert names.count("banded") == 4
    assert len(loop.sums) == 2  # the loss, the gradient of the weights
    assert_same_numbers(closed, axis, slabs, args)


@pytest.mark.parametrize("memory", ["device", "host"])
def test_loops_take_several_slabs_in_a_trip(memory: str) -> None:
    """Whole numbers in 13 rows with halos: loops store convolutions, and others read them behind a maximum."""

    def step(x: Any, kernel: Any) -> Any:
        def conv(x: Any) -> Any:
            return lax.conv_general_dilated(
                x, kernel, (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC")
            )

        a = conv(x)
        b = conv(a) - a.max(1, keepdims=True)
        c = conv(b) + b.min(1, keepdims=True)
        return c.max(1), jnp.square(c).sum(1)

    args = jnp.round(normals(1, 13, 2)), jnp.round(normals(3, 2, 2, seed=1))
    closed, axis, slabs = everything(step, args, (1, 13, 2), 1, 2)
    graph = axis.graph.graph
    convolved = (op.outputs for op in graph.ops if op.fusion == "kernel")
    slabs = replace(slabs, stored=frozenset(value for outputs in convolved for value in outputs))
    loops = loops_of(axis, slabs)
    written = frozenset(value for loop in loops for value in loop.writes)
    if memory == "host":
        slabs = replace(slabs, on_host=written)
    levels = wide_levels(slabs, loops)
    assert len(loops) == 3 and len(levels) == (3 if memory == "host" else 1)
    assert any(loop.level in levels and written.intersection(loop.reads) for loop in loops)
    wide = [
        replace(slabs, at_once=frozenset(zip(levels, counts, strict=True)))
        for counts in itertools.product((2, 3, 7), repeat=len(levels))
    ]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(compat, "empty", anything)
        programs = [in_slabs(axis, each) for each in wide]
    plain, *variants = results([closed, *programs], args)
    for variant in variants:
        assert_equal(variant, plain)


def test_first_slabs_are_fetched_at_most_four_loops_ahead() -> None:
    """XLA would fetch them as soon as they are written, and keep them through all loops between."""

    def step(x: Any) -> Any:
        y = a = jnp.sin(x)
        for _ in range(8):
            y = jnp.cos(y - y.max(0)) * a
        return y.sum(0)

    _, axis, slabs = everything(step, [normals(12, 3)], (12, 3), 0, 2)
    stored = frozenset(
        value for op in axis.graph.graph.ops if op.name in ("sin", "cos") for value in op.outputs
    )
    written = in_slabs(axis, replace(slabs, stored=stored, on_host=stored)).jaxpr
    after = dict[Any, frozenset[int]]()  # by variable: the loops on which it depends
    fetched = dict[Any, frozenset[int]]()  # by first slab: the same
    loops = 0
    fetches_of = list[int]()  # by loop
    for eqn in written.eqns:
        operands = [atom for atom in eqn.invars if compat.is_var(atom)]
        behind = frozenset[int]().union(*(after.get(var, ()) for var in operands))
        slabs_read = [fetched[var] for var in operands if var in fetched]
        if eqn.primitive.name == "scan":
            assert all(set(range(loops - 3)) <= loops_before for loops_before in slabs_read)
            fetches_of.append(len(slabs_read))
            behind |= {loops}
            loops += 1
        elif eqn.primitive.name == "dynamic_slice" or slabs_read:
            fetched.update((var, behind) for var in eqn.outvars)
        after.update((var, behind) for var in eqn.outvars)
    assert loops == 9 and all(fetches_of[1:])


@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.slow), 2, 5])
def test_the_statistics_of_a_batch_norm_are_those_of_the_whole_batch(rows: int) -> None:
    def loss(x: Any, w: Any) -> Any:
        y = jax.lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        mean, variance = y.mean((0, 1, 2)), y.var((0, 1, 2))
        return jnp.sum(jax.nn.relu((y - mean) * jax.lax.rsqrt(variance + 1e-3)) ** 2), (
            mean,
            variance,
        )

    args = normals(5, 4, 4, 2) + 3, normals(3, 3, 2, 3, seed=1)
    closed, axis, slabs = everything(
        jax.value_and_grad(loss, argnums=(0, 1), has_aux=True), args, (5, 4, 4, 3), 0, rows
    )
    assert len(loops_of(axis, slabs)) == 3  # statistics; sums of the gradient; the gradient
    assert_same_numbers(closed, axis, slabs, args, 2e-5)


def test_rows_of_a_table_by_index_and_their_gradients_added_up() -> None:
    """Rows that the last slab has too many are added to no row of the table."""

    def loss(table: Any, tokens: Any) -> Any:
        return (table[tokens] ** 3).sum()

    args = normals(5, 3), jnp.array([4, 1, 1, 0, 2, 1, 4])
    closed, axis, slabs = everything(jax.value_and_grad(loss), args, (7, 3), 0, 3)
    names = {axis.graph.graph.ops[op].name for loop in loops_of(axis, slabs) for op in loop.ops}
    assert {"gather", "scatter-add"} <= names
    assert_same_numbers(closed, axis, slabs, args, 1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_sums_of_halves_are_carried_in_float32(dtype: Any) -> None:
    """Added to 2048 in either type, a one is lost."""
    args = (jnp.ones(2500, dtype),)
    _, axis, slabs = everything(
        lambda x: (lax.reduce_sum(x * 2, [0]), lax.cumsum(x * 2)), args, (2500,), 0, 1
    )
    ((total, on_the_way),) = results([in_slabs(axis, slabs)], args)
    assert total.dtype == on_the_way.dtype == dtype and total == np.asarray(5000, dtype)
    np.testing.assert_array_equal(on_the_way, np.arange(2, 5001, 2).astype(dtype))


def test_what_is_read_whole_is_put_together_before_the_loop() -> None:
    """Inside of it, it would be that of the loop's own trace, and again in every trip."""

    def function(x: Any) -> Any:
        y = jnp.sin(x)
        turned = y.T
        return y @ turned, turned

    args = (normals(6, 3),)
    closed, axis, slabs = everything(function, args, (6, 3), 0, 4)
    new = in_slabs(axis, slabs)
    assert all(not isinstance(value, jax.core.Tracer) for _, value in compat.consts_of(new))
    assert_same_numbers(closed, axis, slabs, args)


SCANS = {
    "sums": (lax.cumsum, -2, 3),
    "products": (lax.cumprod, -1, 2),  # ones and zeros
    "greatest": (lax.cummax, -9, 10),
    "least": (lax.cummin, -9, 10),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(
            name, dtype, marks=[pytest.mark.slow] * (name != "sums" and dtype != jnp.float32)
        )
        for name in SCANS
        for dtype in (jnp.float32, jnp.int32, jnp.int8, jnp.bfloat16)
    ],
)
def test_what_is_cumulative_goes_on_from_slab_to_slab(name: str, dtype: Any) -> None:
    """Read by a convolution with rows beside the slab, more of them than a slab of one row has."""
    scan, low, high = SCANS[name]
    numbers = np.random.default_rng(0).integers(low, high, (1, 11, 2))
    args = [jnp.asarray(numbers, dtype), jnp.ones((5, 2, 1), dtype)]

    def function(x: Any, w: Any) -> Any:
        cumulative = scan(x * 1, 1)
        numbers = "NHC", "HIO", "NHC"
        wide = lax.conv_general_dilated(cumulative, w, (1,), "SAME", dimension_numbers=numbers)
        square, total = jnp.square(wide.astype(jnp.float32)), cumulative.astype(jnp.float32).sum()
        return cumulative, square, scan(wide, 1, reverse=True), total

    cuts = [everything(function, args, (1, 11, 2), 1, rows) for rows in (1, 4, 11)]
    plain, *split = results([cuts[0][0], *(in_slabs(axis, slabs) for _, axis, slabs in cuts)], args)
    for _, axis, slabs in cuts:
        (loop,) = loops_of(axis, slabs)
        names = [axis.graph.graph.ops[op].name for op in loop.ops]
        assert [name for name in names if name.startswith("cum")] == [scan.__name__]
        assert [axis.flat.eqns[number].params["reverse"] for number in axis.blocked] == [True]
    for results_of_cut in split:
        assert_equal(results_of_cut, plain)


@pytest.mark.parametrize("rows", [1, 2, 4, 5])
@pytest.mark.parametrize("read", [slice(3, None), slice(None, -3), slice(1, None, 2)], ids=str)
def test_rows_that_nobody_reads_are_made_for_those_behind_them(read: slice, rows: int) -> None:
    """Of the slab's first ones, which a shift leaves out."""
    args = (jnp.arange(33).reshape(11, 3) % 7,)
    closed, axis, slabs = everything(
        lambda x: jnp.cumsum(x, 0)[read] * 2, args, (11, 3), 0, 2 * rows
    )
    assert_equal(*results([in_slabs(axis, slabs), closed], args))


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 9])
def test_cumulative_logarithms_of_sums_are_the_same_but_for_rounding(rows: int) -> None:
    """One of them of rows that are -inf at first, and one of every other row of another."""

    def function(x: Any) -> Any:
        first = lax.cumlogsumexp(jnp.where(jnp.arange(9)[:, None] < 4, -jnp.inf, x))
        return jnp.exp(first), lax.cumlogsumexp(jnp.cumsum(x, 0) - 1)

    args = (normals(9, 3),)
    closed, axis, slabs = everything(function, args, (9, 3), 0, rows)
    assert len(loops_of(axis, slabs)) == 1 and not axis.blocked
    assert_same_numbers(closed, axis, slabs, args, 1e-6)


def test_what_is_cumulative_and_behind_a_wall_begins_anew_where_it_is_made_again() -> None:
    """Its rows less their mean: made again from the first row on by the loop that knows the mean."""

    def function(x: Any) -> Any:
        cumulative = jnp.cumsum(x, 0)
        return jnp.cumsum(cumulative - cumulative.mean(0), 0) ** 2

    args = (normals(11, 3),)
    closed, axis, slabs = everything(function, args, (11, 3), 0, 4)
    names = [
        [axis.graph.graph.ops[op].name for op in loop.ops].count("cumsum")
        for loop in loops_of(axis, slabs)
    ]
    assert names == [1, 2]
    assert_same_numbers(closed, axis, slabs, args, 1e-5)


def step(x: Any, w: Any) -> Any:
    return jax.value_and_grad(lambda w: jnp.square(jnp.tanh(x[::2] @ w)).mean())(w)


def planned() -> tuple[Program, Slabs]:
    program = trace(step, (normals(12, 3), normals(3, 4)), {}, {})
    axis = axis_at(program.flat, 0, 0)
    ops = frozenset(axis.graph.along)
    stored = frozenset(
        next(op.outputs for number, op in enumerate(axis.graph.graph.ops) if number in ops)
    )
    return program, Slabs(0, 0, 4, ops, stored, frozenset())


def test_a_plan_is_followed_and_recorded() -> None:
    program, slabs = planned()
    followed = follow_slabs(program, slabs)
    assert str(followed.jaxpr) == str(with_slabs(program, slabs).jaxpr)
    (recorded,) = followed.in_slabs
    assert followed.transforms == (slabs,) and recorded.loops
    split, plain = results([followed.jaxpr, program.jaxpr], [normals(12, 3), normals(3, 4)])
    assert_close(split, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "wrong",
    [
        {"value": 10_000},
        {"value": -1},
        {"dim": 2},
        {"dim": -1},
        {"rows": 0},
        {"rows": -4},
        {"rows": 3},  # every other row: half a row of the result
        {"ops": frozenset({10_000})},
        {"ops": frozenset()},
        {"stored": frozenset({10_000})},
        {"stored": frozenset({1})},  # an input
        {"on_host": frozenset({1})},
        {"recomputed_in": frozenset({(1, 1)})},
        {"on_device": frozenset({(1, 1)})},  # not on the host
        {"at_once": frozenset({(10_000, 2)})},
        {"at_once": frozenset({(0, 1)})},
        {"at_once": frozenset({(0, 1 << 30)})},
        {"at_once": frozenset({(0, 2), (0, 3)})},
    ],
    ids=str,
)
def test_a_plan_with_loops_that_a_step_does_not_have_is_refused(wrong: dict[str, Any]) -> None:
    program, slabs = planned()
    with pytest.raises(
        PlanMismatchError, match=r"loops over slabs that this step does not have.*Plan again\."
    ):
        follow_slabs(program, replace(slabs, **wrong))
