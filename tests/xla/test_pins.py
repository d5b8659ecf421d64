"""Pins of buffers that kernels of the reverse pass read."""

from __future__ import annotations

import pytest

from memplan.hardware.backend import GPU
from memplan.planning.problem import Pin, Where
from memplan.xla.buffers import problem_of
from memplan.xla.pins import with_pins
from tests.hlo import read_module

PIN = Pin("y", Where.HOST)
TEXT = """\
HloModule step, is_scheduled=true

%%largest (a: f32[], i: s32[], b: f32[], j: s32[]) -> (f32[], s32[]) {
  %%a = f32[] parameter(0)
  %%i = s32[] parameter(1)
  %%b = f32[] parameter(2)
  %%j = s32[] parameter(3)
  %%max = f32[] maximum(%%a, %%b)
  %%min = s32[] minimum(%%i, %%j)
  ROOT %%both = (f32[], s32[]) tuple(%%max, %%min)
}

%%sum (left: f32[], right: f32[]) -> f32[] {
  %%left = f32[] parameter(0)
  %%right = f32[] parameter(1)
  ROOT %%total = f32[] add(%%left, %%right)
}

%%pool (x: f32[8], i: s32[8], zero: f32[], none: s32[]) -> (f32[8], s32[8]) {
  %%x = f32[8]{0} parameter(0)
  %%i = s32[8]{0} parameter(1)
  %%zero = f32[] parameter(2)
  %%none = s32[] parameter(3)
  ROOT %%window = (f32[8]{0}, s32[8]{0}) reduce-window(%%x, %%i, %%zero, %%none), window={size=1}, to_apply=%%largest, metadata={op_name="jit(step)/%(scope)s/reduce_window"}
}

ENTRY %%main (x: f32[8], i: s32[8], zero: f32[], none: s32[]) -> f32[8] {
  %%x = f32[8]{0} parameter(0)
  %%i = s32[8]{0} parameter(1)
  %%zero = f32[] parameter(2)
  %%none = s32[] parameter(3)
  %%pooled = (f32[8]{0}, s32[8]{0}) fusion(%%x, %%i, %%zero, %%none), kind=kLoop, calls=%%pool
  %%values = f32[8]{0} get-tuple-element(%%pooled), index=0
  %%indices = s32[8]{0} get-tuple-element(%%pooled), index=1
  ROOT %%gradient = f32[8]{0} scatter(%%x, %%indices, %%values), update_window_dims={}, inserted_window_dims={0}, scatter_dims_to_operand_dims={0}, index_vector_dim=1, to_apply=%%sum, metadata={op_name="jit(step)/transpose(jvp())/scatter"}
}
"""  # noqa: E501


@pytest.mark.parametrize("scope", ["memplan.pin.0", "forward"])
def test_of_an_operation_of_several_results_the_first_is_the_pinned_value(scope: str) -> None:
    module = read_module(TEXT % {"scope": scope})
    problem = with_pins(problem_of(module, GPU), module, [PIN])
    pins = {buffer.name: buffer.pin for buffer in problem.buffers if buffer.pin is not None}
    assert pins == ({"pooled{0}": PIN} if scope != "forward" else {})
