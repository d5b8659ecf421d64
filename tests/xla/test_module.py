"""Text of modules: lines, computations; what is not scheduled HLO is said to be none."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from memplan.xla import module
from memplan.xla.module import (
    Edit,
    UnreadableModuleError,
    copy_done,
    copy_start,
    read_instruction,
)
from memplan.xla.shapes import Array
from tests.hlo import read_module


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
    text = """HloModule m, is_scheduled=true, input_output_alias={ {0}: (0, {1}, may-alias) }

ENTRY %e (a: (f32[], f32[])) -> (f32[]) {
  %a = (f32[], f32[]) parameter(0)
  %b = f32[] get-tuple-element(%a), index=1
  ROOT %r = (f32[]) tuple(%b)
}
"""
    with pytest.raises(UnreadableModuleError, match="donates a part of a tuple"):
        _ = read_module(text).aliases


def test_arrays_that_were_put_on_the_device_make_no_other_module() -> None:
    device = jax.devices()[0]

    def fingerprint(*arrays: jax.Array) -> str:
        return read_module(str(jax.jit(lambda x, y: x @ y).lower(*arrays).compile().as_text())).fingerprint

    x = jnp.ones((8, 8))
    assert fingerprint(x, x) == fingerprint(jax.device_put(x, device), x)
    assert fingerprint(x, x) != fingerprint(x, jnp.ones((8, 9)))


def test_a_fingerprint_does_not_depend_on_the_numbers_of_constants() -> None:
    text = """HloModule m, is_scheduled=true, entry_computation_layout={()->s32[]}

ENTRY %main () -> s32[] {
  %constant_7_0 = s32[] constant(3)
  %constant_9 = s32[] constant(4)
  ROOT %sum = s32[] subtract(%constant_7_0, %constant_9)
}
"""
    module, renumbered = read_module(text), read_module(text.replace("constant_7_0", "constant_2111_0"))
    swapped = read_module(text.replace("(%constant_7_0, %constant_9)", "(%constant_9, %constant_7_0)"))
    assert (module.fingerprint, module.structure) == (renumbered.fingerprint, renumbered.structure)
    assert module.fingerprint != swapped.fingerprint and module.structure != swapped.structure


@pytest.mark.parametrize(
    ("shape", "nbytes"),
    [
        ("f32[16384]{0}", 1 << 16),
        ("f32[16383]{0}", 0),
        ("bf16[2,128,128]{2,1,0:T(8,128)}", 1 << 16),
        ("pred[65536]{0}", 1 << 16),
        ("s32[]", 0),
    ],
)
def test_constants_are_large_by_what_they_take(shape: str, nbytes: int) -> None:
    text = f"""\
HloModule m, is_scheduled=true

%fused () -> f32[] {{
  ROOT %one.2 = {shape} constant({{...}}), metadata={{stack_frame_id=1}}
}}

ENTRY %main () -> f32[] {{
  %two = {shape} copy(%constant.1), frontend_attributes={{a="constant(1)"}}
}}
"""
    constants = module.read_module(text).large_constants  # XLA reads no constant that is left out
    assert [(op.name, op.nbytes) for op in constants] == ([("one.2", nbytes)] if nbytes else [])


FUSION = "  %f = f32[8]{0} fusion(%x), kind=kLoop, calls=%g, control-predecessors={%y}"
MANY = FUSION.replace("(%x)", "(%a, %b, %c, %d, %e, /*index=5*/%h)")


def test_an_instruction_changes_by_its_facts() -> None:
    op = read_instruction(FUSION)
    config = '{"fusion_backend_config":{"kind":"__custom_fusion"}}'
    changed = op.changed(kind="kCustom", frontend_attributes={"stream": "1"}, backend_config=config, ordered=False)
    assert (changed.kind, changed.frontend_attributes, changed.backend_config) == ("kCustom", {"stream": "1"}, config)
    assert changed.predecessors == () and changed.called == ("g",)
    assert read_instruction(changed.line) == changed
    again = changed.changed(frontend_attributes={"stream": "0"}, backend_config="{}", called={"g": "g.run2"})
    assert (again.frontend_attributes, again.backend_config, again.called) == ({"stream": "0"}, "{}", ("g.run2",))
    assert read_instruction(again.line) == again


def test_an_instruction_that_changes_in_nothing_is_itself() -> None:
    op = read_instruction(FUSION)
    assert op.changed(name="f", operands=["x"], root=False, kind="kLoop", called={"other": "x"}) is op


@pytest.mark.parametrize(
    "line",
    [
        '  %c = f32[] constant(1), metadata={op_name="a"}',
        '  %c = f32[512,512]{1,0} constant({...}), frontend_attributes={number="1"}',
        "  %c = f32[512,512]{1,0} constant({...})",
        '  %c = f32[8]{0} parameter(2), sharding={replicated}, metadata={op_name="a"}',
        MANY.replace("%f = ", "%c = "),
    ],
)
def test_another_name_leaves_the_rest_of_the_line(line: str) -> None:
    changed = read_instruction(line).changed(name="d", root=True)
    assert changed.line == line.replace("%c = ", "ROOT %d = ")
    assert changed.changed(name="c", root=False).line == line


def test_other_operands_lose_the_comments_of_the_old_ones() -> None:
    changed = read_instruction(MANY).changed(operands=["x", "y"], ordered=False)
    assert changed.line == FUSION.replace("(%x)", "(%x, %y)").partition(", control")[0]


def test_a_copy_says_from_where_to_where() -> None:
    array = Array("f32", (8,), "{0}")
    start = copy_start("s", array.in_host_memory, array, "x", {"stream": "0"})
    line = '  %s = (f32[8]{0:S(5)}, f32[8]{0}, u32[]) copy-start(%x), frontend_attributes={stream="0"}'
    assert start.line == line
    assert copy_done("d", array.in_host_memory, "s").line == "  %d = f32[8]{0:S(5)} copy-done(%s)"


def test_a_clone_has_clones_of_what_it_calls_before_it() -> None:
    module = read_module("""HloModule m, is_scheduled=true

%inner (p: f32[8]) -> f32[8] {
  ROOT %p = f32[8]{0} parameter(0)
}

%outer (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %q = f32[8]{0} fusion(%p), kind=kLoop, calls=%inner
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %y = f32[8]{0} call(%x), to_apply=%outer
}
""")
    edit = Edit(module)
    inner, outer = edit.clone("outer", "run", 2)
    assert (inner.name, outer.name, outer.root.called) == ("inner.run2", "outer.run2", ("inner.run2",))
    assert outer.text.startswith("%outer.run2 (p: f32[8]) -> f32[8] {")
    assert edit.module is module
