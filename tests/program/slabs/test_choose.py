"""Which slabs are worth compiling: large ops, and slabs of tiny steps under budgets."""

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from memplan.hardware import catalog
from memplan.planning.graph import ALIGNED
from memplan.planning.slabs.price import SlabLimits
from memplan.planning.slabs.slabs import least_rows, trips_of
from memplan.program.slabs import choose
from memplan.program.slabs.choose import Frontier, PricedSlabs, SlabChoices, large_ops
from memplan.program.trace import Program, trace
from models.train import unet3d_step
from models.unet3d import UNet3DConfig
from tests.planning.slab_graphs import NamedGraph, NamedOp, named_graph
from tests.xla.steps import array

DEVICE = catalog.named("v100")
KIB = 1 << 10


def traced(step: Callable[..., Any], *args: Any, **options: Any) -> Program:
    return trace(step, args, {}, options)


def token_loss(hidden: Any, table: Any) -> Any:
    """Logits of 256 tokens by 512 words: 512 KiB."""
    return -jax.nn.log_softmax(hidden @ table)[:, 0].mean()


def tokens() -> Program:
    return traced(jax.value_and_grad(token_loss, argnums=(0, 1)), array(256, 4), array(4, 512))


def small_between_large() -> NamedGraph:
    """Elementwise ops on few bytes between kernels on many, and behind them."""
    light = {"nbytes": 2, "fusion": "elementwise"}
    return named_graph(
        {"x": 8},
        {
            "first": NamedOp({"x": ALIGNED}, nbytes=100),
            "sum": NamedOp({"first": ALIGNED}, nbytes=1, reduces=True, fusion="reduction"),
            "light": NamedOp({}, ["sum"], **light),
            "lighter": NamedOp({"light": ALIGNED}, **light),
            "kernel": NamedOp({"light": ALIGNED}, nbytes=2),
            "second": NamedOp({"lighter": ALIGNED, "first": ALIGNED}, nbytes=100),
            "behind": NamedOp({"light": ALIGNED}, **light),
            "scaled": NamedOp({"x": ALIGNED}, nbytes=60, scale=Fraction(1, 2), rows=4),
        },
        ["second", "behind", "kernel", "scaled"],
    )


@pytest.mark.parametrize(
    ("nbytes", "names"),
    [
        (101, set()),
        (100, {"first", "sum", "light", "lighter", "second"}),
        (60, {"first", "sum", "light", "lighter", "second", "scaled"}),
        (1, {"first", "sum", "light", "lighter", "kernel", "second", "behind", "scaled"}),
    ],
)
def test_large_ops_and_what_is_light_between_them(nbytes: int, names: set[str]) -> None:
    program = small_between_large()
    assert large_ops(program.graph, nbytes) == {program.ops[name] for name in names}


def test_arrays_of_one_shape_are_as_large_as_the_widest_of_them() -> None:
    """A product in half precision goes with the loss that reads it in full."""
    program = named_graph(
        {"x": 8},
        {
            "logits": NamedOp({"x": ALIGNED}, nbytes=50, shape=(100,)),
            "wide": NamedOp({"logits": ALIGNED}, nbytes=100, shape=(100,), fusion="elementwise"),
            "other": NamedOp({"x": ALIGNED}, nbytes=50),
        },
        ["wide", "other"],
    )
    assert large_ops(program.graph, 60) == {program.ops["logits"], program.ops["wide"]}


def check(ranked: Sequence[PricedSlabs], limits: SlabLimits) -> None:
    """All slabs differ, can be written, and have at least two trips; the best come first."""
    for priced in ranked:
        graph, ops = priced.axis.graph, priced.slabs.ops
        assert ops and ops <= graph.along.keys() and priced.slabs.rows % least_rows(graph, ops) == 0
        assert trips_of(graph, priced.slabs) >= 2
    assert len({priced.slabs for priced in ranked}) == len(ranked)
    assert ranked[0] == min(ranked, key=lambda priced: limits.order(priced.price))


def axis_of(priced: PricedSlabs) -> tuple[int, int]:
    return priced.slabs.value, priced.slabs.dim


def test_slabs_of_tokens_fit_where_their_logits_do_not() -> None:
    limits = SlabLimits(200 * KIB, 0, 30 * KIB)
    ranked = [*Frontier(tokens().flat, DEVICE).within(limits)]
    check(ranked, limits)
    best = ranked[0]
    assert limits.excess(best.price) == 0 and best.slabs.dim == 0 and best.slabs.rows < 256
    assert not best.slabs.on_host


def test_the_axis_that_splits_most_comes_first() -> None:
    """Heads split the scores, tokens the logits as well."""

    def loss(hidden: Any, key: Any, table: Any) -> Any:
        weights = jax.nn.softmax(jnp.einsum("qhd,khd->hqk", hidden, key))
        return token_loss(jnp.einsum("hqk,khd->qhd", weights, key).reshape(256, 16), table)

    program = traced(loss, array(256, 4, 4), array(256, 4, 4), array(16, 512))
    limits = SlabLimits(1000 * KIB, 0, 100 * KIB)
    ranked = [*Frontier(program.flat, DEVICE).within(limits)]
    check(ranked, limits)
    best = ranked[0]
    assert limits.excess(best.price) == 0
    shape = program.flat.values[best.slabs.value].aval.shape
    assert (shape, best.slabs.dim) == ((4, 256, 256), 1)


def convolutions(count: int) -> Program:
    """With norms, and the gradients of their weights; each makes 32 MiB."""
    numbers = ("NHWC", "HWIO", "NHWC")

    def loss(weights: Any, x: Any) -> Any:
        for w in weights:
            x = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)
            x = x - x.mean((1, 2))
            x = jax.nn.relu(x * lax.rsqrt(jnp.square(x).mean((1, 2)) + 1e-3))
        return jnp.square(x).mean()

    weights = [array(3, 3, 1 if not number else 32, 32) for number in range(count)]
    return traced(jax.grad(loss), weights, array(1, 512, 512, 1))


def test_what_was_chosen_for_less_room_is_refined_within_all_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program, limits = convolutions(4), SlabLimits(100 << 20, 1 << 40, 0)
    ranked = [*Frontier(program.flat, DEVICE).within(limits)]
    check(ranked, limits)
    monkeypatch.setattr(choose, "_TIGHTER_SHARE", 1.0)
    without = next(Frontier(program.flat, DEVICE).within(limits))
    assert limits.fits(ranked[0].price) and not limits.less(0.6).fits(ranked[0].price)
    assert limits.fits(without.price) and ranked[0].price.seconds < 0.95 * without.price.seconds


def test_near_limits_refine_the_slabs_before_and_others_search_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searched = list[SlabLimits]()
    search = choose._ranked_slabs

    def ranked_slabs(candidate: Any, limits: SlabLimits) -> list[PricedSlabs]:
        searched.append(limits)
        return search(candidate, limits)

    monkeypatch.setattr(choose, "_ranked_slabs", ranked_slabs)
    program = convolutions(4)
    frontier = Frontier(program.flat, DEVICE)
    first, near, far = (SlabLimits(mib << 20, 1 << 40, 0) for mib in (100, 92, 200))
    within = {limits: [*frontier.within(limits)] for limits in (first, near, far)}
    assert searched == [first, far]
    for limits, ranked in within.items():
        check(ranked, limits)
        assert all(priced.choice.limits == limits for priced in ranked)
        fastest = next(Frontier(program.flat, DEVICE).within(limits))
        assert ranked[0].fits and fastest.fits
        assert ranked[0].price.seconds <= 1.02 * fastest.price.seconds
    assert within[far][0].slabs == fastest.slabs


def test_where_nothing_is_expected_to_fit_the_best_of_every_axis_comes_first() -> None:
    limits = SlabLimits(40 * KIB, 0, 30 * KIB)
    ranked = [*Frontier(tokens().flat, DEVICE).within(limits)]
    axes = [axis_of(priced) for priced in ranked]
    assert not any(limits.fits(priced.price) for priced in ranked)
    assert len(set(axes[:3])) == len(set(axes)) == 3
    ranked = [*Frontier(convolutions(2).flat, DEVICE).within(limits)]
    # the width is as good as the height
    assert [axis_of(priced)[1] for priced in ranked[:2]] == [1, 3]


def test_no_row_of_a_million_has_a_trip_of_its_own() -> None:
    """The gradient of what is hidden is too large, and no slab is small enough."""
    rows, limits = 1 << 20, SlabLimits(8 << 20, 0, 0)
    program = traced(jax.value_and_grad(token_loss, argnums=(0, 1)), array(rows, 4), array(4, 16))
    ranked = [*Frontier(program.flat, DEVICE).within(limits)]
    assert ranked and not any(limits.fits(priced.price) for priced in ranked)
    assert all(trips_of(priced.axis.graph, priced.slabs) <= rows / 64 for priced in ranked)


def test_nothing_is_found_to_fit_below_what_is_resident() -> None:
    limits = SlabLimits(20 * KIB, 0, 30 * KIB)
    assert not [*Frontier(tokens().flat, DEVICE).within(limits)]


def test_programs_that_take_too_long_are_left_out() -> None:
    candidates = [*SlabChoices(tokens(), DEVICE).programs(300 * KIB, 0, 1e3)]
    assert candidates and all(candidate.write().in_slabs for candidate in candidates)
    assert not [*SlabChoices(tokens(), DEVICE).programs(300 * KIB, 0, 1.0)]


def test_a_step_without_axes_has_no_slabs() -> None:
    program = traced(jnp.linalg.inv, array(64, 64))
    assert not [*Frontier(program.flat, DEVICE).within(SlabLimits(KIB, KIB, 0))]
    assert not [*SlabChoices(program, DEVICE).smallest(KIB)]


def test_the_smallest_slabs_are_below_those_of_any_limit() -> None:
    choices = SlabChoices(tokens(), DEVICE)
    smallest = next(choices.smallest(0))
    assert smallest.write().in_slabs
    assert [slabs.rows for slabs in smallest.slabs] == [1]
    for kib in (40, 80, 160, 320, 640):
        nbytes = [each.expected_bytes for each in choices.programs(kib * KIB, 0, 1e9)]
        assert all(each >= smallest.expected_bytes for each in nbytes)


def test_the_smallest_slabs_go_along_the_axes_that_promise_about_as_few_bytes() -> None:
    program = traced(jax.grad(token_loss, argnums=1), array(1024, 4), array(4, 512))
    smallest = [*SlabChoices(program, DEVICE).smallest(1 << 30)]
    nbytes = [slabs.expected_bytes for slabs in smallest]
    assert len(smallest) == 2 and nbytes[0] < nbytes[1] <= 1.25 * nbytes[0]
    sizes = [each.write().in_slabs[0].graph.sizes for each in smallest]
    assert {1024, 512} == {max(size.values()) for size in sizes}


@pytest.mark.parametrize("limit", ["_MOST_OPS", "_MOST_COPIES", "_SMALLER"])
def test_the_smallest_slabs_are_few_ops_and_much_smaller(monkeypatch: Any, limit: str) -> None:
    monkeypatch.setattr(choose, limit, 0)
    assert not [*SlabChoices(tokens(), DEVICE).smallest(0)]


def losses(*losses: Callable[[Any, Any], Any]) -> Program:
    """One of two losses of 256 tokens, as the first number says."""

    def step(hidden: Any, table: Any) -> Any:
        return lax.cond(hidden[0, 0] > 0, *losses, hidden, table)

    return traced(step, array(256, 4), array(4, 512))


def gram_loss(hidden: Any, table: Any) -> Any:
    """By 6 KiB from 40 tokens: beside the arguments they take less than slabs of `token_loss`."""
    return (hidden[:40] @ hidden[:40].T).sum()


@pytest.mark.parametrize(
    ("branches", "split"),
    [((token_loss, token_loss), 2), ((token_loss, gram_loss), 1), ((gram_loss, token_loss), 1)],
)
def test_computations_that_take_no_more_whole_stay_whole(branches: Any, split: int) -> None:
    smallest = next(SlabChoices(losses(*branches), DEVICE).smallest(0))
    assert len(smallest.slabs) == split
    assert len(smallest.write().in_slabs) == split


def test_the_smallest_slabs_keep_the_hosts_limit() -> None:
    step, args = unet3d_step(24, config=UNet3DConfig(filters=4, levels=2))
    frontier = Frontier(traced(step, *args).flat, DEVICE)
    stored = list[int]()
    for host_bytes in (1 << 30, 3_000_000, 500_000):
        ranked = frontier.smallest(SlabLimits(0, host_bytes, 0))
        assert all(priced.price.host_bytes <= host_bytes for priced in ranked)
        stored.append(ranked[0].price.host_bytes)
    assert stored[0] > stored[1] > stored[2] == 0


TABLE = np.ones((256, 512), np.float32)


@pytest.mark.parametrize(
    ("step", "donated", "resident"),
    [
        (jnp.sin, {}, 2 * 512),
        (jnp.sin, {"donate_argnums": 0}, 512),
        (lambda x: x * TABLE, {}, 3 * 512),
    ],
)
def test_what_is_donated_is_resident_once(
    monkeypatch: Any, step: Any, donated: Any, resident: int
) -> None:
    """A state of 512 KiB that the step writes anew; one closes over a table that is as large."""
    requested: list[SlabLimits] = []
    monkeypatch.setattr(Frontier, "within", lambda _, limits: requested.append(limits) or [])
    program = traced(step, array(256, 512), **donated)
    assert not [*SlabChoices(program, DEVICE).programs(1000 * KIB, 7, 1e3)]
    assert requested == [SlabLimits(950 * KIB, 7, resident * KIB)]
