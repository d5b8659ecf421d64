"""Workspace of libraries, and algorithms of cuDNN with less of it: from a log of XLA's autotuner."""

from __future__ import annotations

import json

import pytest

from memplan.hardware.catalog import named
from memplan.verify.same_module import judge
from memplan.xla import workspace
from memplan.xla.module import Module
from memplan.xla.replay import replay
from memplan.xla.workspace import (
    largest_algorithm_workspace,
    slower_s,
    with_less_workspace,
    workspace_nbytes,
)
from tests.hlo import read_module

MIB = 1 << 20


def record(engine: int, nbytes: int) -> dict[str, object]:
    return {
        "algo_id": str(engine), "is_cudnn_frontend": False, "math_type": "DEFAULT_MATH",
        "tuning_knobs": {"2": "3"} if engine == 7 else {}, "workspace_size": str(nbytes),
    }  # fmt: skip


def convolution(name: str, of: str, nbytes: int = 64 * MIB, engine: int = 7) -> str:
    config = json.dumps({"cudnn_conv_backend_config": {"algorithm": record(engine, nbytes)}})
    return (
        f"%{name} = (f32[1,64,128,128]{{3,2,1,0}}, u8[{nbytes}]{{0}}) custom-call(%{of}, %w), "
        "window={size=3x3 pad=1_1x1_1}, dim_labels=bf01_oi01->bf01, "
        f'custom_call_target="__cudnn$convForward", backend_config={config}'
    )


STEP = f"""HloModule step, is_scheduled=true

ENTRY %main (x: f32[1,64,128,128], w: f32[64,64,3,3]) -> f32[1,64,128,128] {{
  %x = f32[1,64,128,128]{{3,2,1,0}} parameter(0)
  %w = f32[64,64,3,3]{{3,2,1,0}} parameter(1)
  {convolution("conv.1", "x")}
  %first = f32[1,64,128,128]{{3,2,1,0}} get-tuple-element(%conv.1), index=0
  {convolution("conv.2", "first")}
  ROOT %second = f32[1,64,128,128]{{3,2,1,0}} get-tuple-element(%conv.2), index=0
}}
"""


def result(engine: int, nbytes: int, milliseconds: float, more: str = "") -> str:
    knobs = "tuning_knobs { key: 2 value: 3 }" if engine == 7 else ""
    return f"""
  results {{
    scratch_bytes: {nbytes}
    run_time {{ nanos: {round(milliseconds * 1e6)} }}
    algorithm {{ algo_id: {engine} {knobs} workspace_size {{ value: {nbytes} }} }} {more}
  }}"""


def log(*results: str, name: str = "conv.1") -> str:
    return f"""logs {{
  instr {{
    [type.googleapis.com/xla.HloInstructionProto] {{
      name: "{name}"
      opcode: "custom-call"
      backend_config: "{{\\"operation_queue_id\\":\\"0\\"}}"
    }}
  }}{"".join(results)}
}}
"""


CHOSEN = result(7, 64 * MIB, 2.0)
FUSION = """logs {
  instr { [type.googleapis.com/xla.HloInstructionProto] { name: "fusion" } }
  results { run_time { nanos: 5 } other { name: "NATIVE_EMITTER" } }
}
"""


@pytest.fixture(autouse=True)
def nothing_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "_timed", {})


def smaller(text: str) -> list[tuple[int, str, float]]:
    """Of each convolution after it: bytes of workspace, engine, and milliseconds more."""
    module = with_less_workspace(read_module(STEP), text)
    return [row(module, name) for name in ("conv.1", "conv.2")]


def row(module: Module, name: str) -> tuple[int, str, float]:
    op = module.instructions[name]
    chosen = json.loads(op.backend_config)["cudnn_conv_backend_config"]["algorithm"]
    assert chosen["workspace_size"] == str(workspace_nbytes(op))
    return workspace_nbytes(op), chosen["algo_id"], round(1e3 * slower_s(op), 6)


UNCHANGED = [(64 * MIB, "7", 0.0)] * 2


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([], UNCHANGED),
        ([result(0, 0, 9.0)], [(0, "0", 7.0)] * 2),
        # The convolution's arrays take 8.1 MiB; of workspaces up to a sixteenth, the fastest
        ([result(0, 0, 9.0), result(3, MIB // 2, 2.5)], [(MIB // 2, "3", 0.5)] * 2),
        # nothing is as small: the least
        ([result(3, 8 * MIB, 2.5), result(4, 4 * MIB, 3.0)], [(4 * MIB, "4", 1.0)] * 2),
        ([result(3, 128 * MIB, 2.5)], UNCHANGED),
        ([result(0, 0, 1.0, "failure { kind: DISQUALIFIED }")], UNCHANGED),
    ],
)
def test_equal_convolutions_get_the_fastest_algorithm_with_little_workspace(
    others: list[str], expected: list[tuple[int, str, float]]
) -> None:
    """XLA times one of equal convolutions; the log names that one."""
    assert smaller(FUSION + log(CHOSEN, *others)) == expected


def test_what_is_timed_once_is_known_for_later_modules() -> None:
    """XLA keeps its choices for the process: it times nothing again, and the log stays empty."""
    assert smaller("") == UNCHANGED
    assert smaller(log(CHOSEN, result(0, 0, 9.0))) == smaller("") == [(0, "0", 7.0)] * 2


@pytest.mark.parametrize(
    "text",
    [
        log(result(7, 32 * MIB, 2.0), result(0, 0, 9.0)),  # of another convolution of this name
        log(CHOSEN, result(0, 0, 9.0), name="conv.3"),
    ],
)
def test_a_log_of_other_convolutions_changes_nothing(text: str) -> None:
    plain = read_module(STEP)
    assert with_less_workspace(plain, text) is plain


def test_a_workspace_that_is_read_stays() -> None:
    scratch = f"%scratch = u8[{64 * MIB}]{{0}} get-tuple-element(%conv.1), index=1"
    read = read_module(STEP.replace("ROOT %second", f"{scratch}\n  ROOT %second"))
    assert smaller(log(CHOSEN, result(0, 0, 9.0))) == [(0, "0", 7.0)] * 2
    module = with_less_workspace(read, "")
    assert [row(module, name)[1] for name in ("conv.1", "conv.2")] == ["7", "0"]


def test_a_log_of_another_convolution_does_not_replace_what_was_timed() -> None:
    assert smaller(log(CHOSEN, result(0, 0, 9.0))) == [(0, "0", 7.0)] * 2
    assert smaller(log(result(7, MIB, 2.0), result(0, 0, 3.0))) == [(0, "0", 7.0)] * 2


def test_a_step_takes_as_much_longer_as_xla_timed() -> None:
    plain = read_module(STEP)
    module = with_less_workspace(plain, log(CHOSEN, result(0, 0, 9.0)))
    before, after = (replay(each, named("a100")) for each in (plain, module))
    assert after.slower_s == pytest.approx(14e-3) and before.slower_s == 0
    assert after.step_s - before.step_s == pytest.approx(14e-3)
    assert largest_algorithm_workspace(plain) == 64 * MIB
    assert largest_algorithm_workspace(module) == 0


def test_only_algorithms_differ() -> None:
    """With its own workspace and configuration, the module is the plain one."""
    plain = read_module(STEP)
    module = with_less_workspace(plain, log(CHOSEN, result(0, 0, 9.0)))
    assert module.structure == plain.structure and module is not plain
    judge(module, with_less_workspace(module, ""))
