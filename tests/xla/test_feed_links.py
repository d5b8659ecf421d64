"""Kernels in an order that feeds the links, and collectives beside them: who comes first, and what may not move."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from memplan.verify.same_module import judge
from memplan.xla.module import Module
from memplan.xla.replay import replay
from tests.xla.collective_modules import A100, EIGHT, fusion, live, module, overlapped, summed

DONATED = ", input_output_alias={ {0}: (0, {}, may-alias) }"
LAYERS = 600  # longer than both sums


def step(*ends: str, layers: int = LAYERS, more: str = "") -> Module:
    """Heavy kernels, two gradients of the first of them, and at the end the sums of both."""
    heavy = [fusion("h0", "a", "b", kind="kCustom")]
    heavy += [fusion(f"h{n}", f"h{n - 1}", "b", kind="kCustom") for n in range(1, layers)]
    gradients = fusion("x", "h0", "b"), fusion("y", "h1", "b")
    first, second = summed("s", "x", more), summed("t", "y")
    loss = fusion("loss", f"h{layers - 1}", "b")
    result = "(f32[512,1024]{1,0}, f32[512,1024]{1,0}, f32[512,1024]{1,0})"
    root = f"ROOT %out = {result} tuple(%new.a, %new.b, %loss)"
    lines = (
        heavy[0],
        gradients[0],
        heavy[1],
        gradients[1],
        *heavy[2:],
        loss,
        *first,
        *second,
        *ends,
        root,
    )
    return module(*lines, alias=DONATED)


def woven_of(plain: Module) -> Module:
    """With the collectives beside all kernels that are left."""
    return overlapped(plain, 2**40, "in turn")


UPDATES = fusion("new.a", "a", "s.done"), fusion("new.b", "b", "t.done")


def order(hlo: Module) -> list[str]:
    return list(hlo.entry.ops)


def test_sums_start_where_their_gradients_are_and_are_freed_where_the_links_are_done() -> None:
    plain = step(*UPDATES)
    woven = woven_of(plain)
    judge(plain, woven)
    names = order(woven)
    assert names[names.index("x") + 1] == "s"
    assert names.index("t") < names.index("s.done")
    heavy = [name for name in names if name[0] == "h"]
    assert heavy == [f"h{n}" for n in range(LAYERS)]
    after, before = replay(woven, A100, EIGHT), replay(plain, A100, EIGHT)
    assert not after.stalls
    assert after.step_s < before.step_s
    assert (
        after.hidden_collective_s
        == pytest.approx(after.collective_s)
        == pytest.approx(before.collective_s)
    )
    assert (
        names[names.index("s.done") + 1] == "new.a" and names[names.index("t.done") + 1] == "new.b"
    )


def test_a_sum_is_waited_for_at_the_first_kernel_after_the_links_are_done() -> None:
    woven = woven_of(step(*UPDATES))
    timeline, names = replay(woven, A100, EIGHT), order(woven)
    for sent in timeline.transfers:
        at = names.index(f"{sent.name}.done")
        last = next(name for name in reversed(names[:at]) if name[0] == "h")
        start, end = timeline.spans[last]
        assert start < sent.end_s <= end


def backward(layers: int, between: Callable[[int], Sequence[str]] = lambda n: ()) -> Module:
    """Heavy kernels; behind all of them, heavy gradients of each, from the last to the first, and their sums.

    Args:
      between: what stands behind a heavy kernel; the next reads `m` and its number.
    """
    chain = [fusion("m0", "a", "b")]
    for n in range(layers):
        chain += [
            fusion(f"h{n}", f"m{n}", "b", kind="kCustom"),
            *(between(n) or [fusion(f"m{n + 1}", f"h{n}", "b")]),
        ]
    gradients = [fusion(f"g{n}", f"h{n}", "b", kind="kCustom") for n in range(layers)]
    sums = [line for n in range(layers) for line in summed(f"sum{n}", f"g{n}")]
    updates = [
        fusion(f"new{n}", f"sum{n}.done", f"new{n - 1}" if n else "b") for n in range(layers)
    ]
    return module(
        *chain,
        *gradients,
        *sums,
        *updates,
        "ROOT " + fusion("out", f"new{layers - 1}", f"m{layers}"),
    )


def test_a_gradient_is_computed_as_soon_as_it_can() -> None:
    """XLA leaves the gradients of weights to the end, with what they read."""
    plain = backward(9)
    woven = woven_of(plain)
    judge(plain, woven)
    names = order(woven)
    for n in range(9):
        assert names.index(f"g{n}") < names.index(f"m{n + 1}")
    assert replay(woven, A100, EIGHT).step_s < replay(overlapped(plain, 2**40), A100, EIGHT).step_s
    assert live(woven) < live(plain)


def test_a_gradient_is_computed_beside_the_next_sum_that_heavy_kernels_wait_for() -> None:
    """As those of a norm's statistics: the gradient of a layer runs beside the sum of the next."""
    layers, last = 9, 6  # the last with such a sum

    def statistics(n: int) -> Sequence[str]:
        if n > last:
            return ()
        return (
            fusion(f"x{n}", f"h{n}", "b"),
            *summed(f"all{n}", f"x{n}"),
            fusion(f"m{n + 1}", f"all{n}.done", "b"),
        )

    plain = backward(layers, statistics)
    woven = woven_of(plain)
    judge(plain, woven)
    names = order(woven)
    for n in range(layers):
        where = (f"x{n}", f"all{n}.done") if n <= last else (f"h{n}", f"m{n + 1}")
        assert names.index(where[0]) < names.index(f"g{n}") < names.index(where[1])
    assert replay(woven, A100, EIGHT).step_s < replay(overlapped(plain, 2**40), A100, EIGHT).step_s


def test_a_kernel_between_two_sums_runs_when_the_links_are_done_with_the_first() -> None:
    chain = [fusion(f"h{n}", f"h{n - 1}" if n else "a", "b", kind="kCustom") for n in range(LAYERS)]
    sums = *summed("s", "x"), fusion("narrow", "s.done", "b"), *summed("t", "narrow")
    end = "ROOT " + fusion("out", f"h{LAYERS - 1}", "t.done")
    plain = module(chain[0], fusion("x", "h0", "b"), *chain[1:], *sums, end)
    woven = woven_of(plain)
    judge(plain, woven)
    names, timeline = order(woven), replay(woven, A100, EIGHT)
    at = names.index("narrow")
    assert names[at - 1] == "s.done" and names[at + 1] == "t"
    start, end_s = timeline.spans[names[at - 2]]
    assert start < timeline.transfers[0].end_s <= end_s
    assert not timeline.stalls


def test_what_is_short_waits_for_the_links_at_its_end() -> None:
    plain = step(*UPDATES, layers=3)
    woven = woven_of(plain)
    judge(plain, woven)
    assert [name for name in order(woven) if name not in ("a", "b")] == [
        "h0", "x", "s", "h1", "y", "h2", "loss", "s.done", "t", "new.a", "t.done", "new.b", "out"]  # fmt: skip


def test_a_reader_of_a_donated_argument_stays_before_its_update() -> None:
    norm = fusion("norm", "a", "t.done")
    ends = norm, UPDATES[0], fusion("new.b", "norm", "t.done")
    plain = step(*ends)
    woven = woven_of(plain)
    assert woven is not plain
    judge(plain, woven)
    names = order(woven)
    assert (
        names.index("s.done") < names.index("t.done") < names.index("norm") < names.index("new.a")
    )


def test_what_xla_wants_in_order_stays_so() -> None:
    plain = step(*UPDATES, more=", control-predecessors={%h9}")
    woven = woven_of(plain)
    judge(plain, woven)
    names = order(woven)
    assert names[names.index("y") + 1] == "t"
    assert max(names.index("h9"), names.index("t")) < names.index("s") < names.index("t.done")


def test_nothing_moves_for_what_a_heavy_kernel_waits_for() -> None:
    heavy = module(
        fusion("x", "a", "b"),
        *summed("s", "x"),
        "ROOT " + fusion("out", "s.done", "a", kind="kCustom"),
    )
    assert woven_of(heavy) is heavy
    alone = module(fusion("x", "a", "b"), *summed("s", "x"), "ROOT " + fusion("out", "s.done", "a"))
    assert woven_of(alone) is alone
    none = module("ROOT " + fusion("out", "a", "b"))
    assert woven_of(none) is none


def tight(sums: int, heavy: int) -> Module:
    """Heavy kernels, the first ones each behind the sum of the one before; the first one's gradient is summed, too."""
    lines = [fusion("h0", "a", "b", kind="kCustom"), fusion("g", "h0", "b"), *summed("free", "g")]
    for n in range(heavy):
        lines += summed(f"c{n}", f"h{n}") if n < sums else ()
        lines.append(
            fusion(f"h{n + 1}", f"c{n}.done" if n < sums else f"h{n}", "b", kind="kCustom")
        )
    return module(
        *lines, fusion("new", "free.done", "b"), "ROOT " + fusion("out", "new", f"h{heavy}")
    )


def test_a_sum_that_nothing_heavy_waits_for_yields_to_those_on_the_critical_path() -> None:
    plain = tight(4, heavy=LAYERS)
    first, in_turn = (overlapped(plain, 2**40, how) for how in ("critical first", "in turn"))
    judge(plain, first)
    sent = [transfer.name for transfer in replay(first, A100, EIGHT).transfers]
    assert sent == ["c0", "c1", "c2", "c3", "free"]
    assert replay(first, A100, EIGHT).step_s < replay(in_turn, A100, EIGHT).step_s


def test_updates_run_while_others_wait_for_the_links() -> None:
    """The last sum on the critical path is waited for, and an update's sum is done before."""
    lines = [fusion("h0", "a", "b", kind="kCustom"), *summed("free", "h0")]
    lines += [fusion("h1", "h0", "b", kind="kCustom"), *summed("c", "h1")]
    lines += [fusion("h2", "c.done", "b", kind="kCustom")]
    lines += [fusion("new", "free.done", "b"), "ROOT " + fusion("out", "new", "h2")]
    names = order(woven_of(module(*lines)))
    assert names.index("free.done") < names.index("c.done")
    assert names.index("c") < names.index("new") < names.index("c.done")
