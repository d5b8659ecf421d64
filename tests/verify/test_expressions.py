"""Expressions are the same for the same, whatever it is called and in which fusion it is computed."""

from __future__ import annotations

from memplan.verify.expressions import Expressions, Meaning, ModuleExpressions
from memplan.xla.module import Module
from tests.hlo import read_module

ARRAY = "f32[8]{0}"
TWO = f"""%two.0 (p: f32[8], q: f32[8]) -> (f32[8], f32[8]) {{
  %p = {ARRAY} parameter(0)
  %q = {ARRAY} parameter(1)
  %s = {ARRAY} add(%p, %q)
  %t = {ARRAY} negate(%s)
  ROOT %u = ({ARRAY}, {ARRAY}) tuple(%s, %t)
}}"""
SUM = f"""%sum.0 (a: f32[8], b: f32[8]) -> f32[8] {{
  %a = {ARRAY} parameter(0)
  %b = {ARRAY} parameter(1)
  ROOT %c = {ARRAY} add(%a, %b), metadata={{op_name="elsewhere" stack_frame_id=7}}
}}"""


def module(fusion: str, *bodies: str) -> Module:
    text = "\n\n".join(bodies)
    return read_module(f"""HloModule jit_step, is_scheduled=true

{text}

ENTRY %main (x: f32[8], y: f32[8]) -> f32[8] {{
  %x = {ARRAY} parameter(0)
  %y = {ARRAY} parameter(1)
  ROOT %made = {fusion}
}}
""")


def meanings(hlo: Module, expressions: Expressions, *operands: Meaning) -> list[Meaning]:
    op = hlo.entry.ops["made"]
    return (
        ModuleExpressions(hlo, expressions)
        .fusion(op, tuple((operand,) for operand in operands))
        .results
    )


def test_a_result_means_the_same_in_another_fusion_under_other_names() -> None:
    expressions, x, y = Expressions(), (100, 0), (101, 0)
    both = module(f"({ARRAY}, {ARRAY}) fusion(%x, %y), kind=kLoop, calls=%two.0", TWO)
    alone = module(f"{ARRAY} fusion(%x, %y), kind=kLoop, calls=%sum.0", SUM)
    added, negated = meanings(both, expressions, x, y)
    assert meanings(alone, expressions, x, y) == [added] != [negated]
    assert meanings(alone, expressions, y, x) != [added]


def test_what_reads_an_operand_is_known() -> None:
    hlo = module(f"({ARRAY}, {ARRAY}) fusion(%x, %y), kind=kLoop, calls=%two.0", TWO)
    op, x, y = hlo.entry.ops["made"], (100, 0), (101, 0)
    fusion = ModuleExpressions(hlo, Expressions()).fusion(op, ((x,), (y,)))
    assert fusion.readers == {x: {fusion.results[0]}, y: {fusion.results[0]}}


def test_a_view_of_a_view_is_one_of_what_that_is_of() -> None:
    expressions, x = Expressions(), (100, 0)
    flat = expressions.view("f32[8]", x, "f32[2,4]")
    assert flat != x and expressions.view("f32[2,4]", flat, "f32[8]") == x
    assert expressions.view("f32[4,2]", flat, "f32[8]") == expressions.view(
        "f32[4,2]", x, "f32[2,4]"
    )
