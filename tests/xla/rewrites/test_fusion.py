"""Fusions written anew: what makes some of their results, and lines that read as the old ones do."""

from __future__ import annotations

from memplan.xla.module import Names, read_instruction
from memplan.xla.rewrites.fusion import backward_slice, insert, readers_of, renumber, slice_fusion
from tests.hlo import read_module

ARRAY = "f32[4]{0}"
MODULE = read_module(f"""HloModule jit_small, is_scheduled=true

%both.0 (p: f32[4], q: f32[4], r: f32[4]) -> (f32[4], f32[4]) {{
  %p = {ARRAY} parameter(0)
  %q = {ARRAY} parameter(1)
  %r = {ARRAY} parameter(2)
  %s = {ARRAY} add(%p, %q)
  %t = {ARRAY} multiply(%s, %r)
  ROOT %u = ({ARRAY}, {ARRAY}) tuple(%s, %t)
}}

ENTRY %main (x: f32[4], y: f32[4], z: f32[4]) -> f32[4] {{
  %x = {ARRAY} parameter(0)
  %y = {ARRAY} parameter(1)
  %z = {ARRAY} parameter(2)
  %both = ({ARRAY}, {ARRAY}) fusion(%x, %y, %z), kind=kLoop, calls=%both.0
  %first = {ARRAY} get-tuple-element(%both), index=0
  %second = {ARRAY} get-tuple-element(%both), index=1
  %flat = f32[2,2]{{1,0}} bitcast(%first)
  %far = {ARRAY} custom-call(%flat, %x), custom_call_target="far"
  ROOT %end = {ARRAY} custom-call(%second), custom_call_target="end"
}}
""")
BODY, FUSED = MODULE.entry, MODULE["both.0"]


def test_a_backward_slice_ends_at_what_is_given() -> None:
    assert [op.name for op in backward_slice(FUSED.ops, ["t"])] == ["p", "q", "r", "s", "t"]
    assert [op.name for op in backward_slice(FUSED.ops, ["t"], {"s"})] == ["r", "s", "t"]
    assert [op.name for op in backward_slice(FUSED.ops, ["s", "s"])] == ["p", "q", "s"]


def test_a_fusion_of_one_result_reads_only_what_makes_it() -> None:
    fusion, text = slice_fusion(BODY.ops["both"], FUSED, [0], "one", "one.0", Names(MODULE))
    assert fusion.line == f"  %one = {ARRAY} fusion(%x, %y), kind=kLoop, calls=%one.0"
    head, *lines, end = text.split("\n")
    assert (head, end) == ("%one.0 (p: f32[4], q: f32[4]) -> f32[4] {", "}")
    assert [read_instruction(line).opcode for line in lines] == ["parameter", "parameter", "add"]
    assert read_instruction(lines[-1]).root


def test_readers_are_found_behind_names() -> None:
    assert readers_of(BODY, BODY.ops["both"], "both{0}") == {"far"}
    assert readers_of(BODY, BODY.ops["both"], "both{1}") is None, "the end reads it"


def test_another_index_is_written_over_the_old_one_alone() -> None:
    line = f'  %e = {ARRAY} get-tuple-element(%both), index=3, metadata={{op_name="index=3"}}'
    assert renumber(read_instruction(line), 12) == line.replace("index=3,", "index=12,")


def test_new_computations_stand_in_front_of_who_calls_them() -> None:
    found = insert({"a": "1", "b": "2", "c": "3"}, "b", "4", {"d": "5"})
    assert list(found.items()) == [("a", "1"), ("d", "5"), ("b", "4"), ("c", "3")]
