"""New and changed instructions state the facts that they were made of, in HLO that XLA reads."""

import pytest

from memplan.xla.edit import Edit, instruction
from memplan.xla.shapes import Array
from tests.hlo import read_instruction, read_module, text_of

VECTOR, HALF, SCALAR = Array("f32", (8,)), Array("f32", (4,)), Array("f32", ())
PAIRS = ((0, 1), (2, 3))
SOURCE = read_instruction(
    '  %s = f32[8] negate(%a), metadata={op_name="jit(step)/neg" stack_frame_id=3}'
)
TEXT = """HloModule step, num_partitions=4

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %z = f32[] add(%x, %y)
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8] parameter(0)
  ROOT %s = f32[8] negate(%a)
}
"""
NEW = [
    instruction("zero", "constant", SCALAR, like=SOURCE, literal=0),
    instruction("none", "constant", Array("s32", ()), literal=0),
    instruction("pad", "pad", Array("f32", (13,)), ["a", "zero"], padding=[(2, 3, 0)]),
    instruction("spaced", "pad", Array("f32", (15,)), ["a", "zero"], padding=[(0, 0, 1)]),
    instruction("cut", "slice", HALF, ["a"], slices=[(0, 8, 2)], like=SOURCE),
    instruction("rows", "reshape", Array("f32", (2, 4)), ["a"]),
    instruction("turned", "transpose", Array("f32", (4, 2)), ["rows"], dimensions=[1, 0]),
    instruction("total", "reduce", SCALAR, ["a", "zero"], dimensions=[0], to_apply="add"),
    instruction(
        "sum",
        "all-reduce",
        VECTOR,
        ["a"],
        like=SOURCE,
        channel=3,
        groups=PAIRS,
        counts_devices=True,
        to_apply="add",
    ),
    instruction("exchange", "all-to-all", (HALF, HALF), ["cut", "cut"], channel=4, groups=PAIRS),
    instruction("received", "get-tuple-element", HALF, ["exchange"], index=1),
    instruction("s", "negate", VECTOR, ["sum"], root=True),
]
BY_NAME = {op.name: op for op in NEW}


def test_xla_reads_new_instructions() -> None:
    edit = Edit(read_module(TEXT, scheduled=False))
    edit.replace(edit["main"].with_ops([edit["main"].ops["a"], *NEW]))
    module = edit.module
    read = read_module(text_of(module), scheduled=False)
    assert {name: op.opcode for name, op in read.entry.ops.items()} == {
        "a": "parameter",
        **{op.name: op.opcode for op in NEW},
    }
    assert module.entry.root is BY_NAME["s"]


def test_facts_of_new_instructions() -> None:
    zero, total = BY_NAME["zero"], BY_NAME["total"]
    assert zero.is_zero and zero.is_positive_zero and zero.has_metadata
    assert BY_NAME["none"].is_zero and BY_NAME["none"].integers == (0,)
    assert [BY_NAME[name].padding for name in ("pad", "spaced")] == [((2, 3, 0),), ((0, 0, 1),)]
    assert BY_NAME["cut"].slices == ((0, 8, 2),)
    assert (BY_NAME["cut"].op_name, BY_NAME["cut"].frame) == ("jit(step)/neg", 3)
    assert BY_NAME["turned"].dimensions == (1, 0) and not BY_NAME["turned"].has_metadata
    assert (total.dimensions, total.to_apply, total.operands) == ((0,), "add", ("a", "zero"))
    reduce, exchange = BY_NAME["sum"], BY_NAME["exchange"]
    assert (reduce.channel, reduce.groups(4), reduce.counts_devices) == (3, PAIRS, True)
    assert (exchange.channel, exchange.groups(4), exchange.counts_devices) == (4, PAIRS, False)
    assert BY_NAME["received"].index == 1


def test_other_channels_opcodes_and_buffers() -> None:
    start = read_instruction(
        "  %s = ((f32[8]), f32[8]) all-reduce-start(%a), channel_id=3, to_apply=%add, "
        "output_to_operand_aliasing={{1}: (0, {})}"
    )
    changed = start.changed(opcode="all-reduce", shape=VECTOR, channel=5, in_place=False)
    assert (changed.opcode, changed.shape, changed.channel) == ("all-reduce", VECTOR, 5)
    assert (changed.to_apply, changed.aliased_outputs) == ("add", ())
    assert start.aliased_outputs == (((1,), 0),)


@pytest.mark.parametrize(("dims", "layout"), [((), ""), ((8,), "{0}"), ((2, 3, 4), "{2,1,0}")])
def test_row_major_layouts(dims: tuple[int, ...], layout: str) -> None:
    array = Array.row_major("f32", dims)
    assert str(array.layout) == layout and array.is_row_major
