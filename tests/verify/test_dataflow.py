"""A computation as it is judged: what its values mean in whatever order, who acts, and who reads what is gone."""

from __future__ import annotations

import pytest

from memplan.verify.dataflow import Dataflow, NotThePlainModuleError, entry_dataflow
from memplan.verify.expressions import Expressions
from tests.hlo import read_module
from tests.verify.test_same_module import BODIES, SPACE

ARRAY, DONATED = "f32[8]{0}", ", input_output_alias={ {}: (0, {}, may-alias) }"
TANH = f"%a = {ARRAY} fusion(%x), kind=kLoop, calls=%tanh.0"
SINE = f"%b = {ARRAY} fusion(%x), kind=kLoop, calls=%sine.0"
LAST = f"ROOT %c = {ARRAY} fusion(%a, %b), kind=kLoop, calls=%sub.0"
GO, GONE = f"%go = ({SPACE}, {ARRAY}, u32[]) copy-start(%a)", f"%gone = {SPACE} copy-done(%go)"
COME, CAME = (
    f"%come = ({ARRAY}, {SPACE}, u32[]) copy-start(%gone)",
    f"%came = {ARRAY} copy-done(%come)",
)
SAY = 'custom-call(%x), custom_call_target="say", custom_call_has_side_effect=true'


def dataflow(*lines: str, alias: str = "", expressions: Expressions | None = None) -> Dataflow:
    entry = "\n".join(f"  {line}" for line in lines)
    return entry_dataflow(
        read_module(f"""HloModule small, is_scheduled=true{alias}
{BODIES}
ENTRY %main (x: f32[8]) -> f32[8] {{
  %x = {ARRAY} parameter(0)
{entry}
}}
"""),
        expressions or Expressions(),
    )


def test_an_output_means_the_same_in_another_order_recomputed_and_after_copies() -> None:
    expressions = Expressions()
    plain = dataflow(TANH, SINE, LAST, expressions=expressions)
    again = LAST.replace("%a", "%a.run2")
    orders = (
        (SINE, TANH, LAST),
        (TANH, SINE, TANH.replace("%a =", "%a.run2 ="), again),
        (TANH, GO, GONE, SINE, COME, CAME, LAST.replace("%a", "%came")),
    )
    for lines in orders:
        assert dataflow(*lines, expressions=expressions).outputs == plain.outputs
    swapped = dataflow(TANH, SINE, LAST.replace("%a, %b", "%b, %a"), expressions=expressions)
    assert swapped.outputs != plain.outputs


def test_a_copy_without_change_of_layout_is_what_it_copies() -> None:
    expressions = Expressions()
    plain = dataflow(TANH, SINE, LAST, expressions=expressions).outputs
    of_a, of_b = (f"%d = {ARRAY} copy(%{name})" for name in "ab")
    last = LAST.replace("%a", "%d")
    assert dataflow(TANH, SINE, of_a, last, expressions=expressions).outputs == plain
    assert dataflow(TANH, SINE, of_b, last, expressions=expressions).outputs != plain
    bent = of_a.replace("{0}", "{0:T(8)}")
    assert dataflow(TANH, SINE, bent, last, expressions=expressions).outputs != plain


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ((SINE, LAST, TANH), "reads a in c before it is made"),
        ((TANH, GO, SINE, LAST), "never waits for go"),
        (
            (TANH, SINE, GO, GONE, GONE.replace("%gone =", "%gone.2 ="), LAST),
            "ends go in gone.2, which is not",
        ),
        ((TANH, SINE, GO, LAST.replace("%a", "%go"), GONE), "reads in c a copy that is under way"),
        (
            (TANH, GO, COME.replace("%gone", "%go"), GONE, CAME, SINE, LAST),
            "copies in come a copy that is under way",
        ),
        (
            (TANH.replace("f32[8]", "bf16[8]"), SINE, LAST),
            "has another shape in a than what it calls",
        ),
        (
            (TANH, SINE, f"%e = {ARRAY} get-tuple-element(%a), index=0", LAST),
            "what is no tuple in e",
        ),
    ],
)
def test_what_cannot_be_is_said_with_names(lines: tuple[str, ...], said: str) -> None:
    with pytest.raises(NotThePlainModuleError, match=said):
        dataflow(*lines)


def test_what_acts_is_kept_in_order() -> None:
    first, second = f"%s = {ARRAY} {SAY}", f"%t = {ARRAY} {SAY.replace('say', 'shout')}"
    expressions, ends = Expressions(), (TANH, SINE, LAST)
    forward, backward = (
        dataflow(*pair, *ends, expressions=expressions)
        for pair in ((first, second), (second, first))
    )
    assert len(forward.effects) == 2 and forward.effects == backward.effects[::-1] == forward.single
    assert not dataflow(*ends).effects


PUT = f"%p = {ARRAY} fusion(%a, %one, %zero), kind=kLoop, calls=%put.0"
UPDATES = (TANH, "%zero = s32[] constant(0)", "%one = f32[1]{0} slice(%x), slice={[0:1]}")


def test_an_update_in_place_is_no_effect_but_runs_once() -> None:
    flow = dataflow(*UPDATES, PUT, SINE, LAST.replace("%a", "%p"))
    assert flow.effects == [] and flow.single == [flow.expressions["p"]]


def late(flow: Dataflow) -> set[str]:
    return {reader for readers in flow.late_reads().values() for reader in readers.values()}


def test_a_reader_behind_an_update_is_late() -> None:
    reader = f"%r = {ARRAY} fusion(%a, %x), kind=kLoop, calls=%sub.0"
    ends = (SINE, LAST.replace("%a", "%p"))
    assert late(dataflow(*UPDATES, reader, PUT, *ends)) == set()
    assert late(dataflow(*UPDATES, PUT, reader, *ends)) == {"r"}


def begun(name: str, result: str, kind: str = "kLoop") -> tuple[str, str]:
    """An asynchronous update of %a."""
    shape = f"({ARRAY}, f32[1]{{0}}, s32[])"
    return (
        f"%{name} = ({shape}, {ARRAY}, u32[]) fusion-start(%a, %one, %zero), kind={kind}, calls=%put.0",
        f"%{result} = {ARRAY} fusion-done(%{name})",
    )


def test_a_reader_behind_the_start_of_an_update_is_late() -> None:
    reader, (start, done) = (
        f"%r = {ARRAY} fusion(%a, %x), kind=kLoop, calls=%sub.0",
        begun("go", "p"),
    )
    ends = (SINE, LAST.replace("%a", "%p"))
    assert late(dataflow(*UPDATES, reader, start, done, *ends)) == {"p"}, (
        "what updates it reads it until it is done"
    )
    assert late(dataflow(*UPDATES, start, reader, done, *ends)) == {"p", "r"}
    assert late(dataflow(*UPDATES, start, done, reader, *ends)) == {"p", "r"}


def test_what_only_computes_may_begin_in_another_order_but_once() -> None:
    """A custom fusion may hold a collective."""
    for kind in ("kLoop", "kCustom"):
        (first, then), (second, last) = begun("go", "p", kind), begun("gone", "q", kind)
        second = second.replace("%a", "%x")
        ends = (then, last, SINE, LAST.replace("%a", "%p").replace("%b", "%q"))
        expressions = Expressions()
        forward, backward = (
            dataflow(*UPDATES, *starts, *ends, expressions=expressions)
            for starts in ((first, second), (second, first))
        )
        assert len(forward.single) == 2 and forward.single == backward.single[::-1]
        assert (forward.meaning == backward.meaning) is (kind == "kLoop")


def test_a_reader_of_a_donated_argument_behind_the_output_is_late() -> None:
    last = LAST.replace("ROOT ", "")
    ends = f"ROOT %d = {ARRAY} bitcast(%c)"
    reader = SINE.replace("%b =", "%r =")
    assert late(dataflow(TANH, SINE, reader, last, ends, alias=DONATED)) == set()
    assert late(dataflow(TANH, SINE, last, reader, ends, alias=DONATED)) == {"r"}
    assert late(dataflow(TANH, SINE, last, reader, ends)) == set()
