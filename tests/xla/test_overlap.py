"""Collectives beside kernels: who starts when, who waits, and what the limit of bytes forbids."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.verify.same_module import judge
from memplan.xla.module import Module
from memplan.xla.replay import replay
from tests.xla.collective_modules import (
    A100,
    EIGHT,
    fusion,
    gathered,
    live,
    module,
    overlapped,
    summed,
)

NO_LIMIT = 2**40
SHARD = "f32[64,1024]{1,0}"
LAYERS = 600  # longer than one collective


def names(hlo: Module) -> list[str]:
    return [name for name in hlo.entry.ops if name not in ("a", "b", "out")]


def moved(plain: Module, limit_nbytes: int = NO_LIMIT) -> Module:
    """Judged, with its kernels in their order."""
    result = overlapped(plain, limit_nbytes)
    judge(plain, result)
    kernels = [
        [name for name in names(hlo) if hlo.entry.ops[name].opcode == "fusion"]
        for hlo in (plain, result)
    ]
    assert kernels[0] == kernels[1]
    return result


def sliced(name: str, of: str) -> str:
    return f"%{name} = {SHARD} slice(%{of}), slice={{[0:64], [0:1024]}}"


def chain(first: int, last: int) -> list[str]:
    return [fusion(f"h{n}", f"h{n - 1}" if n else "a", "b") for n in range(first, last)]


def read_late() -> Module:
    """A shard that is gathered at once, and read behind many kernels."""
    end = "ROOT " + fusion("out", f"h{LAYERS - 1}", "g.done")
    return module(sliced("shard", "a"), *gathered("g", "shard", SHARD), *chain(0, LAYERS), end)


def added_early() -> Module:
    """A sum whose operand is there at once, and that stands before its first reader."""
    end = "ROOT " + fusion("out", f"h{LAYERS - 1}", "s.done")
    return module(fusion("x", "a", "b"), *chain(0, LAYERS), *summed("s", "x"), end)


def test_a_gather_starts_just_in_time() -> None:
    hlo = moved(read_late())
    result, order = replay(hlo, A100, EIGHT), names(hlo)
    assert not result.stalls and result.hidden_collective_s == pytest.approx(result.collective_s)
    (sent,) = result.transfers
    next_kernel = order[order.index("g") + 1]
    start, end = result.spans[next_kernel]
    # one kernel later, somebody would wait
    assert result.spans[f"h{LAYERS - 1}"][1] - sent.end_s <= end - start


def test_a_sum_starts_as_soon_as_it_can_and_ends_when_the_links_are_done() -> None:
    hlo = moved(added_early())
    result, order = replay(hlo, A100, EIGHT), names(hlo)
    assert order[order.index("x") + 1] == "s"
    (sent,), before = result.transfers, order[order.index("s.done") - 1]
    assert result.spans[before][0] < sent.end_s <= result.spans[before][1]
    assert not result.stalls


def test_a_limit_of_bytes_keeps_a_gather_back() -> None:
    """A gather that nothing runs beside: 2 MiB more, while two layers are live, would be too much."""
    layers = [*chain(0, 2), *(fusion(f"h{n}", f"h{n - 1}", f"h{n - 2}") for n in range(2, LAYERS))]
    end = "ROOT " + fusion("out", f"h{LAYERS - 1}", "g.done")
    settled = module(sliced("shard", "a"), *layers, *gathered("g", "shard", SHARD), end)
    assert names(moved(settled, live(settled)))[-3:] == [f"h{LAYERS - 1}", "g", "g.done"]
    assert replay(moved(settled), A100, EIGHT).step_s < replay(settled, A100, EIGHT).step_s


def test_what_one_collective_needs_of_another_is_ended_before() -> None:
    """A sum of a sum: neither may wait for the links beside the other."""
    lines = fusion("x", "a", "b"), *summed("s", "x"), *summed("t", "s.done"), *chain(0, LAYERS)
    hlo = moved(module(*lines, "ROOT " + fusion("out", f"h{LAYERS - 1}", "t.done")))
    order = names(hlo)
    assert order.index("s") < order.index("s.done") < order.index("t") < order.index("t.done")
    assert not replay(hlo, A100, EIGHT).stalls


def test_nothing_moves_without_collectives_or_beside_nothing() -> None:
    none = module("ROOT " + fusion("out", "a", "b"))
    assert overlapped(none, NO_LIMIT) is none
    alone = module(fusion("x", "a", "b"), *summed("s", "x"), "ROOT " + fusion("out", "s.done", "a"))
    assert overlapped(alone, NO_LIMIT) is alone


@given(
    st.lists(
        st.tuples(st.sampled_from("khsg"), st.integers(0, 9), st.integers(0, 9)),
        min_size=3,
        max_size=30,
    )
)
@settings(max_examples=60, deadline=None)
def test_any_module_stays_the_same_step(kinds: list[tuple[str, int, int]]) -> None:
    """Kernels, sums and gathers of any values; those that are read last make the result."""
    lines, values = list[str](), ["a", "b"]
    for number, (kind, first, second) in enumerate(kinds):
        lhs, rhs = values[-1 - first % len(values)], values[-1 - second % len(values)]
        name = f"v{number}"
        if kind in "kh":
            lines.append(fusion(name, lhs, rhs, kind="kCustom" if kind == "h" else "kLoop"))
        elif kind == "s":
            lines += [fusion(f"{name}.x", lhs, rhs), *summed(name, f"{name}.x")]
        else:
            lines += [sliced(f"{name}.x", lhs), *gathered(name, f"{name}.x", SHARD)]
        values.append(name if kind in "kh" else f"{name}.done")
    plain = module(*lines, "ROOT " + fusion("out", values[-1], values[-2]))
    for limit_nbytes in (live(plain), NO_LIMIT):
        assert sorted(names(moved(plain, limit_nbytes))) == sorted(names(plain))
