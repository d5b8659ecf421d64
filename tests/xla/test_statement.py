"""The statement of an instruction, and the options of a module: equal where they say the same."""

from __future__ import annotations

import pytest

from memplan.xla.module import Instruction, Module
from tests.hlo import read_module

SUMS = """%{add}.1 (s: f32[], t: f32[]) -> f32[] {{
  %s = f32[] parameter(0)
  %t = f32[] parameter(1)
  ROOT %u = f32[] add(%s, %t)
}}
"""


def module(line: str, add: str = "add", head: str = ", is_scheduled=true") -> Module:
    text = f"""HloModule step{head}

{SUMS.format(add=add)}
ENTRY %main (x: f32[4,8], y: f32[8,4]) -> f32[4,8] {{
  %x = f32[4,8]{{1,0}} parameter(0)
  %y = f32[8,4]{{1,0}} parameter(1)
  %zero = f32[] constant(0)
  %op = {line}
  ROOT %out = f32[4,8]{{1,0}} negate(%x)
}}
"""
    return read_module(text, scheduled=False)


def instruction(line: str, add: str = "add") -> Instruction:
    return module(line, add).entry.ops["op"]


DOT = "f32[4,4]{1,0} dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
ROWS = "f32[4]{0} reduce(%x, %zero), dimensions={1}, to_apply=%add.1"
COLUMNS = "f32[8]{0} reduce(%x, %zero), dimensions={0}, to_apply=%add.1"
CALL = 'f32[8]{0} custom-call(%x), custom_call_target="a, b"'


@pytest.mark.parametrize(
    ("line", "same"),
    [
        (DOT, f'{DOT}, metadata={{op_name="a(b, {{c=d}})"}}'),
        (DOT, f"{DOT}, control-predecessors={{%zero}}"),
        (COLUMNS, COLUMNS.replace("(%x", "(%y").replace("[8]", "[4]")),
        (CALL, f'{CALL}, backend_config={{"a":1}}'),
        (CALL, f'{CALL}, frontend_attributes={{a="b"}}'),
    ],
)
def test_these_state_the_same(line: str, same: str) -> None:
    assert instruction(line).statement == instruction(same).statement
    assert hash(instruction(line).statement) == hash(instruction(same).statement)


def test_the_names_of_called_computations_are_not_stated() -> None:
    renamed = instruction(ROWS.replace("%add", "%plus"), "plus")
    assert renamed.statement == instruction(ROWS).statement


@pytest.mark.parametrize(
    ("line", "different"),
    [
        (DOT, f"{DOT}, operand_precision={{highest,highest}}"),
        (DOT, "f32[8,8]{1,0} dot(%x, %y), lhs_contracting_dims={0}, rhs_contracting_dims={1}"),
        (ROWS, COLUMNS),
        (CALL, CALL.replace("a, b", "a, c")),
        (CALL, f"{CALL}, custom_call_has_side_effect=true"),
        ("f32[2]{0} constant({1, 2})", "f32[2]{0} constant({1, 3})"),
    ],
)
def test_these_state_something_else(line: str, different: str) -> None:
    assert instruction(line).statement != instruction(different).statement


def test_parameters_state_their_numbers() -> None:
    ops = module(DOT).entry.ops
    assert ops["x"].statement != ops["y"].statement


@pytest.mark.parametrize(
    ("literal", "is_zero"),
    [
        ("f32[] constant(0)", True),
        ("s32[2,2]{1,0} constant({{0, 0}, {0, 0}})", True),
        ("f32[] constant(-0.0)", False),
        ("bf16[] constant(-0.0)", False),
        ("f8e4m3fn[] constant(1)", False),
        ("s4[] constant(1)", False),
        ("f32[2]{0} constant({0, 1})", False),
        ("c64[] constant((0, 0))", False),
        ("f32[] negate(%zero)", False),
    ],
)
def test_only_positive_zeros_are_such(literal: str, is_zero: bool) -> None:
    assert instruction(literal).is_positive_zero == is_zero


def test_options_do_not_say_whether_a_module_is_scheduled() -> None:
    donated = ", input_output_alias={ {}: (0, {}, may-alias) }"
    plain = module(DOT).options
    assert module(DOT, head="").options == plain
    assert module(DOT, head=donated).options != plain
    assert (
        module(DOT, head=f", is_scheduled=true{donated}").options
        == module(DOT, head=donated).options
    )
