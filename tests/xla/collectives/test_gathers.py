"""All-gathers level by level: what is written, which stay, and that the results are the same to the bit."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from memplan.hardware.machine import Groups, Machine
from memplan.xla.collectives.gathers import gathers_in_phases
from memplan.xla.module import Module
from tests.hlo import groups_text, read_module, replaced, short_lines_of, texts_of
from tests.xla.collectives.interpreter import run
from tests.xla.collectives.machines import Case, cases, collectives, groups_along, slow_outside

ORIGIN = 'frontend_attributes={is_spmd_generated="true"}, metadata={op_name="ws[0]"}'
TWO_BY_FOUR = slow_outside(2, 4)
WITHOUT_LATENCY = slow_outside(2, 4, bandwidth=1e9)
HOST_MAJOR, DEVICE_MAJOR = groups_along(TWO_BY_FOUR, (0, 1)), groups_along(TWO_BY_FOUR, (1, 0))


def gather(
    piece: Sequence[int], whole: Sequence[int], dim: int, groups: Groups, layout: str = ""
) -> Module:
    """A module of one all-gather."""
    sides = [f"f32[{','.join(map(str, dims))}]" for dims in (piece, whole)]
    layout = layout or "{" + ",".join(map(str, reversed(range(len(piece))))) + "}"
    text = f"""HloModule step, num_partitions={sum(map(len, groups))}

ENTRY %main (p: {sides[0]}) -> {sides[1]} {{
  %p = {sides[0]}{layout} parameter(0)
  ROOT %whole = {sides[1]}{layout} all-gather(%p), channel_id=1, replica_groups={groups_text(groups)}, dimensions={{{dim}}}, use_global_device_ids=true, {ORIGIN}
}}
"""  # noqa: E501
    return read_module(text, scheduled=False)


def test_across_hosts_first_and_the_pieces_are_put_into_their_places() -> None:
    plain = gather((32, 256), (256, 256), 0, HOST_MAJOR)
    shaped = gathers_in_phases(plain, TWO_BY_FOUR)
    assert short_lines_of(shaped) == [
        "%p = f32[32,256] parameter(0)",
        "%whole.one1 = f32[1,32,256] reshape(%p)",
        "%whole.gather1 = f32[2,32,256] all-gather(%whole.one1), channel_id=2, "
        "replica_groups={{0,4},{1,5},{2,6},{3,7}}, dimensions={0}, use_global_device_ids=true",
        "%whole.one2 = f32[1,2,32,256] reshape(%whole.gather1)",
        "%whole.gather2 = f32[4,2,32,256] all-gather(%whole.one2), channel_id=3, "
        "replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}, use_global_device_ids=true",
        "%whole.turned1 = f32[2,4,32,256] transpose(%whole.gather2), dimensions={1,0,2,3}",
        "ROOT %whole = f32[256,256] reshape(%whole.turned1)",
    ]
    assert shaped.entry.root.shape == plain.entry.root.shape
    new_ops = [op for op in shaped.entry.ops.values() if op.opcode != "parameter"]
    assert all(op.op_name == "ws[0]" for op in new_ops)


def test_pieces_in_the_order_of_devices_lie_right_at_once() -> None:
    shaped = gathers_in_phases(gather((4,), (32,), 0, DEVICE_MAJOR), TWO_BY_FOUR)
    assert [op.opcode for op in shaped.entry.ops.values()] == [
        *("parameter", "reshape", "all-gather", "reshape", "all-gather", "reshape")
    ]


def test_each_byte_passes_the_link_of_a_host_once() -> None:
    plain = gather((32, 256), (256, 256), 0, HOST_MAJOR)
    nbytes = 256 * 256 * 4
    assert [collective.outside_nbytes for collective in collectives(plain, TWO_BY_FOUR)] == [
        7 / 8 * nbytes
    ]
    shaped = gathers_in_phases(plain, TWO_BY_FOUR)
    assert [collective.outside_nbytes for collective in collectives(shaped, TWO_BY_FOUR)] == [
        nbytes / 2,
        0,
    ]


@given(cases())
def test_on_a_gpu_the_same_to_the_bit(case: Case) -> None:
    plain = gather(case.piece, case.whole, case.dim, case.groups)
    check_same(plain, gathers_in_phases(plain, case.machine), case)


@given(cases())
def test_on_a_cpu_the_same_row_by_row(case: Case) -> None:
    minor_first = reversed(range(len(case.piece)))
    plain = gather(
        case.piece, case.whole, case.dim, case.groups, "{" + ",".join(map(str, minor_first)) + "}"
    )
    shaped = gathers_in_phases(plain, case.machine)
    check_same(plain, shaped, case)


def check_same(plain: Module, shaped: Module, case: Case) -> None:
    assert (shaped is not plain) == case.reaches_levels
    count = len(case.machine.devices)
    pieces = np.random.default_rng(0).normal(size=(count, *case.piece)).astype(np.float32)
    ((expected,), (actual,)) = run(plain, pieces), run(shaped, pieces)
    assert actual.tobytes() == expected.tobytes()
    assert sum(
        collective.outside_nbytes for collective in collectives(shaped, case.machine)
    ) <= sum(collective.outside_nbytes for collective in collectives(plain, case.machine))


STAY = {
    "within a host": (gather((4, 8), (16, 8), 0, groups_along(TWO_BY_FOUR, (1,))), TWO_BY_FOUR),
    "one device of each host": (
        gather((4, 8), (8, 8), 0, groups_along(TWO_BY_FOUR, (0,))),
        TWO_BY_FOUR,
    ),
    "unevenly over hosts": (gather((4, 8), (16, 8), 0, ((0, 1, 2, 4), (3, 5, 6, 7))), TWO_BY_FOUR),
    "in no order of places": (gather((4,), (32,), 0, ((0, 1, 2, 4, 3, 5, 6, 7),)), TWO_BY_FOUR),
    "nothing": (gather((4, 0), (32, 0), 0, HOST_MAJOR), TWO_BY_FOUR),
    "columns first": (gather((4, 8), (32, 8), 0, HOST_MAJOR, "{0,1}"), TWO_BY_FOUR),
    "in tiles": (gather((4, 8), (32, 8), 0, HOST_MAJOR, "{1,0:T(8,128)}"), TWO_BY_FOUR),
    "in the host's memory": (gather((4, 8), (32, 8), 0, HOST_MAJOR, "{1,0:S(5)}"), TWO_BY_FOUR),
    "small, on links without latency": (gather((4, 8), (32, 8), 0, HOST_MAJOR), WITHOUT_LATENCY),
}


@pytest.mark.parametrize(("plain", "machine"), STAY.values(), ids=STAY)
def test_what_stays(plain: Module, machine: Machine) -> None:
    assert gathers_in_phases(plain, machine) is plain


@pytest.mark.parametrize(
    ("part", "instead"),
    [
        ("use_global_device_ids=true", "constrain_layout=false"),
        (ORIGIN, "control-predecessors={%p}"),
    ],
)
def test_groups_that_are_not_of_partitions_and_what_has_to_wait_stay(
    part: str, instead: str
) -> None:
    plain = gather((4, 8), (32, 8), 0, HOST_MAJOR)
    variant = replaced(plain, part, instead)
    assert gathers_in_phases(plain, TWO_BY_FOUR) is not plain
    assert gathers_in_phases(variant, TWO_BY_FOUR) is variant


def test_bodies_of_loops_are_changed_and_other_computations_stay() -> None:
    lines = texts_of(gather((4, 8), (32, 8), 0, HOST_MAJOR))["main"]
    text = f"""HloModule step

%body () -> () {{
{lines}
}}

ENTRY %main (p: f32[4,8]) -> f32[32,8] {{
  %q = f32[4,8]{{1,0}} parameter(0)
  ROOT %called = f32[32,8]{{1,0}} call(%q), to_apply=%body
}}
"""
    plain = read_module(text, scheduled=False)
    shaped = gathers_in_phases(plain, TWO_BY_FOUR)
    assert shaped["main"] is plain["main"]
    opcodes = [op.opcode for op in shaped["body"].ops.values()]
    assert opcodes.count("all-gather") == 2
    assert list(shaped) == list(plain)


@pytest.fixture(scope="module")
def on_devices(request: pytest.FixtureRequest) -> Any:
    """What `gathers_on_devices.py` found."""
    script = Path(__file__).with_name("gathers_on_devices.py")
    done = subprocess.run(
        [sys.executable, str(script), str(request.param)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("on_devices", [8, pytest.param(12, marks=pytest.mark.slow)], indirect=True)
def test_xla_gathers_the_same_bits(on_devices: Any) -> None:
    assert on_devices
    assert {name: case for name, case in on_devices.items() if not case["same"]} == {}
    assert any(case["gathers"] > 1 for case in on_devices.values())
