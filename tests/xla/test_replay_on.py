"""Replays of one program on fewer and more devices: overheads cost what they are said to, and never pay."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.hardware import catalog
from memplan.hardware.overheads import NONE, Overheads
from memplan.hardware.topology import topology_named
from memplan.xla.replay import Replay, replay, replay_on
from tests.xla.small_modules import ADD, BIG, HOST, chain, module

P100 = catalog.named("p100")
DDL = topology_named("ddl")
IDEAL = replace(NONE, collective_launch_s=0.0)
HERE = (DDL.resized({"host": 1, "device": 1}), DDL.resized({"host": 1}), DDL)
GROUPS = "replica_groups=[1,256]<=[256], to_apply=%fused_add"

KERNELS = 44
# Three kernels, a sum that travels beside forty more, and a last kernel that needs it.
STEP = module(
    f"""
    {chain(3, "k")}
    %sent = {BIG} all-reduce-start(%k2), {GROUPS}
    {chain(40, "l")}
    %came = {BIG} all-reduce-done(%sent)
    %last = {BIG} fusion(%came, %l39), kind=kLoop, calls=%fused_add
    """,
    ADD,
)
# The same, and a copy to the host that starts just before.
COPIES = STEP.replace(
    "%sent =", f"%o = ({HOST}, {BIG}, u32[]) copy-start(%k1)\n  %sent ="
).replace("%last =", f"%there = {HOST} copy-done(%o)\n  %last =")  # fmt: skip


def on(overheads: Overheads, text: str = STEP) -> list[Replay]:
    """On one device, on one host and on all."""
    return list(replay_on(text, P100, DDL, HERE, overheads))


def test_without_overheads_it_is_the_replay_of_what_was_compiled() -> None:
    assert on(NONE)[-1] == replay(STEP, P100, DDL)


def test_one_device_sends_nothing_and_many_send_more() -> None:
    alone, host, all_of_them = on(NONE)
    assert alone.collective_s == 0 < host.collective_s < all_of_them.collective_s
    assert alone.step_s == pytest.approx(alone.compute_s)
    assert alone.step_s <= host.step_s <= all_of_them.step_s


def test_each_kernel_is_launched() -> None:
    for idle, launched in zip(on(NONE), on(replace(NONE, kernel_launch_s=1e-3)), strict=True):
        assert launched.compute_s == pytest.approx(idle.compute_s + KERNELS * 1e-3)


def test_each_collective_is_launched() -> None:
    for idle, launched in zip(on(NONE)[1:], on(replace(NONE, collective_launch_s=1.0))[1:], strict=True):
        assert launched.collective_s == pytest.approx(idle.collective_s + 1.0, abs=1e-4)


def test_kernels_take_as_long_as_on_the_slowest_device() -> None:
    assumed = replace(NONE, spread=0.02)
    for links, idle, spread in zip(HERE, on(NONE), on(assumed), strict=True):
        assert spread.compute_s == pytest.approx(assumed.slowest(links.devices) * idle.compute_s)


def test_messages_slow_down_the_kernels_beside_them_alone() -> None:
    alone, host, _ = on(replace(NONE, accesses_per_byte=3.0))
    idle_alone, idle_host, _ = on(NONE)
    assert alone == idle_alone
    share = replace(NONE, accesses_per_byte=3.0).memory_share(1.5 * 2**21, host.collective_s, P100.memory_bandwidth)
    beside = 40 * idle_host.compute_s / KERNELS
    assert 0 < share < 0.5
    assert host.collective_s < beside, "it ends beside the kernels"
    assert host.compute_s == pytest.approx(idle_host.compute_s + share * host.collective_s)


def test_input_keeps_the_links_and_the_step_busy() -> None:
    nbytes = 10**8
    for links, idle, fed in zip(HERE, on(NONE), on(replace(NONE, input_bytes=nbytes)), strict=True):
        input_s = links.axis("device").size * nbytes / links.axis("host").bandwidth
        assert fed.step_s >= max(idle.step_s, input_s)
        if idle.collective_s:
            assert min(one.start_s for one in fed.transfers) >= input_s


def test_copies_that_share_the_links_go_before_or_after_messages() -> None:
    for beside, shared in zip(on(NONE, COPIES), on(replace(NONE, copies_share_links=True), COPIES), strict=True):
        assert shared.step_s >= beside.step_s
        out, net = sorted(shared.transfers, key=lambda one: one.start_s)
        assert {out.stream, net.stream} == {"out", "net"}
        assert net.start_s >= out.end_s
        assert beside.transfers[0].end_s > beside.transfers[1].start_s


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_no_overhead_ever_makes_a_step_faster_or_more_efficient(data: st.DataObject) -> None:
    low = Overheads(
        spread=data.draw(st.floats(0, 0.1)),
        kernel_launch_s=data.draw(st.floats(0, 1e-4)),
        collective_launch_s=data.draw(st.floats(0, 1e-4)),
        accesses_per_byte=data.draw(st.floats(0, 10)),
        input_bytes=data.draw(st.integers(0, 10**7)),
    )
    high = replace(low, spread=low.spread + data.draw(st.floats(0, 0.1)))
    alone, *many = on(low)
    slow_alone, *slower = on(high)
    assert alone.step_s == slow_alone.step_s, "alone, a device waits for nobody"
    for fast, slow, idle in zip(many, slower, on(IDEAL)[1:], strict=True):
        assert idle.step_s <= fast.step_s * (1 + 1e-9)
        assert alone.step_s / slow.step_s <= alone.step_s / fast.step_s * (1 + 1e-9)
