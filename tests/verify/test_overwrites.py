"""Which versions of a buffer are gone, and what instructions overwrite."""

from __future__ import annotations

from memplan.verify.overwrites import Loss, ResultLeaf, Updates, Versions, first_result, tree_of
from memplan.xla.shapes import Array
from tests.hlo import read_module

TABLE, PAIR = "f32[8]{0}", "(f32[8]{0}, f32[8]{0})"
IN_PLACE = "output_to_operand_aliasing={{1, 0}: (0, {}), {1, 1}: (1, {})}"
MODULE = read_module(f"""HloModule jit_step, is_scheduled=true

%plus (s: f32[], t: f32[]) -> f32[] {{
  %s = f32[] parameter(0)
  %t = f32[] parameter(1)
  ROOT %u = f32[] add(%s, %t)
}}

%put (p: f32[8], r: f32[1], i: s32[]) -> f32[8] {{
  %p = {TABLE} parameter(0)
  %r = f32[1]{{0}} parameter(1)
  %i = s32[] parameter(2)
  %seen = {TABLE} bitcast(%p)
  ROOT %q = {TABLE} dynamic-update-slice(%seen, %r, %i)
}}

%body (s: (f32[8], f32[8])) -> (f32[8], f32[8]) {{
  %s = {PAIR} parameter(0)
  %a = {TABLE} get-tuple-element(%s), index=0
  %b = {TABLE} get-tuple-element(%s), index=1
  %c = {TABLE} add(%a, %b)
  ROOT %t = {PAIR} tuple(%a, %c)
}}

%test (v: (f32[8], f32[8])) -> pred[] {{
  %v = {PAIR} parameter(0)
  ROOT %yes = pred[] constant(true)
}}

%branch (g: f32[8]) -> f32[8] {{
  %g = {TABLE} parameter(0)
  %n = f32[1]{{0}} constant({{1}})
  %z = s32[] constant(0)
  ROOT %h = {TABLE} fusion(%g, %n, %z), kind=kLoop, calls=%put
}}

ENTRY %main (x: f32[8], y: f32[8], n: f32[1], z: s32[]) -> f32[8] {{
  %x = {TABLE} parameter(0)
  %y = {TABLE} parameter(1)
  %n = f32[1]{{0}} parameter(2)
  %z = s32[] parameter(3)
  %new = {TABLE} fusion(%x, %n, %z), kind=kLoop, calls=%put
  %state = {PAIR} tuple(%new, %y)
  %loop = {PAIR} while(%state), condition=%test, body=%body
  %one = {TABLE} get-tuple-element(%loop), index=1
  %added = {TABLE} custom-call(%one, %y), custom_call_target="adds", output_to_operand_aliasing={{{{}}: (1, {{}})}}
  %sum = ({PAIR}, {PAIR}) all-reduce-start(%one, %added), {IN_PLACE}, to_apply=%plus
  %sums = {PAIR} all-reduce-done(%sum)
  ROOT %called = {TABLE} call(%added), to_apply=%branch
}}
""")
X, Y = ResultLeaf("x", 0), ResultLeaf("y", 0)


def updates(name: str, *operands: ResultLeaf) -> list[tuple[int | None, ResultLeaf]]:
    op = MODULE.entry.ops[name]
    return list(Updates(MODULE).of(op, [operands] if op.opcode == "while" else operands))


def test_what_instructions_overwrite() -> None:
    assert updates("new", X, ResultLeaf("n", 0), ResultLeaf("z", 0)) == [(0, X)]
    assert updates("loop", X, Y) == [(1, Y)], "the body returns the first as it is"
    assert updates("added", X, Y) == [(0, Y)]
    assert updates("called", X) == [(None, X)]
    assert updates("sum", X, Y) == [(2, X), (3, Y)], "behind its operands"
    assert first_result(MODULE.entry.ops["sum"]) == 2


def test_a_version_is_gone_once_its_buffer_is_overwritten() -> None:
    versions = Versions()
    new, view = ResultLeaf("new", 0), ResultLeaf("view", 0)
    versions.written = {"x": -1, "view": 0, "new": 1, "reader": 2}
    versions.name(view, X)
    versions.read(X, 1, "new")
    versions.overwrite(X, 1, "new", new)
    versions.read(view, 2, "reader")
    versions.read(new, 2, "reader")
    assert versions.buffer(new) == versions.buffer(view) == X
    assert list(versions.losses()) == [Loss("new", 1, X, [(1, "new"), (2, "reader")])]


def test_places_have_the_structure_of_a_shape() -> None:
    row = Array.row_major("f32", (8,))
    shape = (row, (Array("s32", ()), row))
    assert tree_of("op", shape) == (ResultLeaf("op", 0), (ResultLeaf("op", 1), ResultLeaf("op", 2)))
