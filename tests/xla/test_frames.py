"""Lines of the user's code behind instructions."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from memplan.xla.frames import sources

HLO = """HloModule jit_step, is_scheduled=true

FileNames
1 "/home/someone/train.py"
2 "/usr/lib/python3.11/site-packages/flax/linen/linear.py"

FunctionNames
1 "step"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=2 end_column=57}
2 {file_name_id=2 function_name_id=1 line=90 end_line=90 column=2 end_column=57}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}


ENTRY %main (a: f32[2]) -> f32[2] {
  %a = f32[2]{0} parameter(0)
  %b = f32[2]{0} negate(%a), metadata={op_name="jit(step)/neg" stack_frame_id=2}
  ROOT %c = f32[2]{0} negate(%b), metadata={op_name="jit(step)/neg" stack_frame_id=1}
}
"""


def test_a_library_is_passed_over() -> None:
    assert sources(HLO) == {"b": "/home/someone/train.py:7", "c": "/home/someone/train.py:7"}


def test_a_library_alone_is_named() -> None:
    alone = HLO.replace("parent_frame_id=2}", "parent_frame_id=1}")
    assert sources(alone)["b"].endswith("flax/linen/linear.py:90")


def test_text_without_tables_tells_nothing() -> None:
    assert sources(HLO[HLO.index("ENTRY") :]) == {}


def test_what_this_jax_writes_is_read() -> None:
    def step(x: jax.Array) -> jax.Array:
        return jnp.sin(x) @ x

    text = jax.jit(step).lower(jax.ShapeDtypeStruct((8, 8), "float32")).compile().as_text()
    line = step.__code__.co_firstlineno + 1
    assert set(sources(text).values()) == {f"tests/program/test_frames.py:{line}"}
