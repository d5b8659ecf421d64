"""Fusions written anew: what makes some of their results, and readers of the new ones."""

from __future__ import annotations

from memplan.xla.edit import Edit, tuple_element
from memplan.xla.rewrites.fusion import (
    BodyChanges,
    backward_slice,
    readers_of,
    slice_fusion,
    without_unread_aliases,
)
from tests.hlo import read_instruction, read_module

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
  %second = {ARRAY} get-tuple-element(%both), index=1, metadata={{op_name="index=1"}}
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
    fusion, fused = slice_fusion(BODY.ops["both"], FUSED, [0], "one", "one.0", Edit(MODULE))
    assert (fusion.name, fusion.opcode, fusion.kind) == ("one", "fusion", "kLoop")
    assert (str(fusion.shape), fusion.operands, fusion.called) == (ARRAY, ("x", "y"), ("one.0",))
    assert (fused.name, fused.is_fused) == ("one.0", True)
    assert [op.opcode for op in fused.ops.values()] == ["parameter", "parameter", "add"]
    assert {n: (op.name, str(op.shape)) for n, op in fused.parameters.items()} == {
        0: ("p", ARRAY),
        1: ("q", ARRAY),
    }
    assert (fused.root.opcode, fused.root.operands) == ("add", ("p", "q"))


def test_readers_are_found_behind_names() -> None:
    assert readers_of(BODY, BODY.ops["both"], "both{0}") == {"far"}
    assert readers_of(BODY, BODY.ops["both"], "both{1}") is None, "the end reads it"


def test_another_index_is_written_over_the_old_one_alone() -> None:
    element = MODULE.entry.ops["second"]
    assert (element.index, element.op_name) == (1, "index=1")
    changed = element.changed(index=0)
    assert (changed.index, changed.op_name) == (0, "index=1")
    assert changed.changed(index=1).statement == element.statement != changed.statement
    assert (changed.name, changed.shape, changed.operands) == ("second", element.shape, ("both",))


def test_new_computations_stand_in_front_of_who_calls_them() -> None:
    edit = Edit(MODULE)
    fusion, fused = slice_fusion(BODY.ops["both"], FUSED, [0], "one", "one.0", edit)
    changes = BodyChanges(
        {"both": [BODY.ops["both"], fusion], "first": []}, {"first": "one"}, [fused]
    )
    changes.apply(edit, BODY)
    assert list(edit.module) == ["both.0", "one.0", "main"]
    names = ["x", "y", "z", "both", "one", "second", "flat", "far", "end"]
    assert list(edit.module.entry.ops) == names
    assert edit.module.entry.ops["flat"].operands == ("one",)
    assert edit.module["both.0"] is FUSED


def test_aliases_of_aliases_go_if_none_is_read() -> None:
    unread = [tuple_element("third", FUSED.root.shape, "both", 0), *BODY.ops.values()]
    unread[1:1] = [read_instruction(f"  %view = {ARRAY} bitcast(%third)")]
    assert without_unread_aliases(unread) == list(BODY.ops.values())
