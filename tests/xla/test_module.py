"""Text of modules: shapes, lines, computations; what is not scheduled HLO is said to be none."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.xla.module import Array, Shape, UnreadableModuleError, leaves, read_instruction, read_module, read_shape

ARRAYS = st.builds(
    Array,
    st.sampled_from(["f32", "bf16", "pred", "s8", "u64", "c64", "f8e4m3fn", "token"]),
    st.lists(st.integers(0, 999), max_size=4).map(tuple),
    st.sampled_from(["", "{0}", "{1,0:S(5)}", "{}"]),
)
SHAPES = st.recursive(ARRAYS, lambda parts: st.lists(parts, max_size=4).map(tuple), max_leaves=12)


def spelled(shape: Shape) -> str:
    return str(shape) if isinstance(shape, Array) else f"({', /*index=5*/'.join(map(spelled, shape))})"


@given(SHAPES)
def test_shapes_are_read_as_they_are_written(shape: Shape) -> None:
    assert read_shape(spelled(shape)) == shape


@pytest.mark.parametrize(
    ("text", "nbytes", "on_host"),
    [
        ("f32[2,3]{1,0}", 24, False),
        ("pred[5]{0}", 5, False),
        ("bf16[4]{0:S(5)}", 8, True),
        ("s4[3]{0}", 2, False),
        ("token[]", 0, False),
        ("f32[<=4]{0}", 16, False),
        ("c128[2]{0}", 32, False),
    ],
)
def test_bytes_and_memory_of_an_array(text: str, nbytes: int, on_host: bool) -> None:
    (array,) = leaves(read_shape(text))
    assert (array.nbytes, array.on_host) == (nbytes, on_host)


def test_a_line() -> None:
    op = read_instruction(
        "  ROOT %fusion.1 = ((f32[4]{0}, s32[]), f32[4]{0}, u32[]) fusion-start(%a.b-c, %d), kind=kLoop, "
        'calls=%fused, metadata={op_name="f(x), g(y)"}'
    )
    assert (op.name, op.opcode, op.operands, op.root) == ("fusion.1", "fusion-start", ("a.b-c", "d"), True)
    assert op.called == ("fused",)
    assert op.attribute("kind") == "kLoop"
    assert op.attribute("absent") == ""
    assert [array.nbytes for array in op.result] == [16, 4, 16, 4]


def test_called_computations_of_every_kind() -> None:
    line = "  %w = s32[] while(%a), condition=%c.1, body=%b.1"
    branches = "  %w = s32[] conditional(%i, %a, %b), branch_computations={%x, %y}"
    assert read_instruction(line).called == ("c.1", "b.1")
    assert read_instruction(branches).called == ("x", "y")


def test_a_compiled_module_is_read_whole() -> None:
    def step(state: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y, _ = jax.lax.scan(lambda y, _: (jnp.tanh(y @ x), None), state, length=3)
        return y, y.sum()

    text = jax.jit(step, donate_argnums=0).lower(jnp.ones((8, 8)), jnp.ones((8, 8))).compile().as_text()
    module = read_module(str(text))
    assert module.name == "jit_step"
    assert module.aliases == {0: 0}
    assert sorted(module.entry.parameters) == [0, 1]
    for body in module.values():
        made: set[str] = set()
        for op in body.ops.values():
            assert set(op.operands) <= made
            assert set(op.called) <= set(module)
            made.add(op.name)


@pytest.mark.parametrize("text", ["", "HloModule m\n\nENTRY %e (a: f32[]) -> f32[] {\n}\n", "nonsense"])
def test_what_is_not_scheduled_is_refused(text: str) -> None:
    with pytest.raises(UnreadableModuleError, match="not scheduled HLO"):
        read_module(text)


def test_a_line_that_is_none_is_shown() -> None:
    with pytest.raises(UnreadableModuleError, match="what is that"):
        read_instruction("  what is that")


def test_a_part_of_a_tuple_cannot_be_donated() -> None:
    text = "HloModule m, is_scheduled=true, input_output_alias={ {0}: (0, {1}, may-alias) }\n\nENTRY %e () -> () {\n}"
    with pytest.raises(UnreadableModuleError, match="donates a part of a tuple"):
        _ = read_module(text).aliases
