"""Sums out of accumulation loops: what moves, and what has to stay."""

import re

import pytest

from memplan.xla.collectives.hoist import hoist_sums
from memplan.xla.module import Module
from tests.hlo import read_module, short_lines_of, text_of, texts_of

SUMMED = (
    "channel_id=3, replica_groups={{0,1,2,3,4,5,6,7}}, use_global_device_ids=true, to_apply=%add"
)
STATE = "(s32[], f32[4,2], f32[4,2])"
ORIGIN = "jit(step)/while/body/transpose"
TOLD = f'metadata={{op_name="{ORIGIN}"}}'


def loop(
    body: str = f"%s = f32[4,2] all-reduce(%t), {SUMMED}, {TOLD}",
    add: str = "f32[4,2] add(%acc, %s)",
    condition: str = "",
    zero: str = "f32[4,2] broadcast(%none), dimensions={}",
    trips: str = "",
    behind: str = "%out = f32[4,2] get-tuple-element(%w), index=1\n  ROOT %r = f32[4,2] negate(%out)",
    inner: str = "",
) -> Module:
    """Three trips that add something to the second of what the loop carries.

    Args:
      inner: computations that `body` calls.
    """
    text = f"""HloModule step, num_partitions=8

%add (x: f32[], y: f32[]) -> f32[] {{
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %z = f32[] add(%x, %y)
}}

%most (mx: f32[], my: f32[]) -> f32[] {{
  %mx = f32[] parameter(0)
  %my = f32[] parameter(1)
  ROOT %mz = f32[] maximum(%mx, %my)
}}
{inner}
%body (state: (s32[], f32[4,2], f32[4,2])) -> (s32[], f32[4,2], f32[4,2]) {{
  %state = (s32[], f32[4,2], f32[4,2]) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %acc = f32[4,2] get-tuple-element(%state), index=1
  %v = f32[4,2] get-tuple-element(%state), index=2
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %t = f32[4,2] multiply(%v, %v)
  {body}
  %more = {add}
  ROOT %carried = (s32[], f32[4,2], f32[4,2]) tuple(%next, %more, %v)
}}

%condition (given: (s32[], f32[4,2], f32[4,2])) -> pred[] {{
  %given = (s32[], f32[4,2], f32[4,2]) parameter(0)
  %at = s32[] get-tuple-element(%given), index=0
  %last = s32[] constant(3)
  {condition}
  ROOT %goes = pred[] compare(%at, %last), direction=LT
}}

ENTRY %main (a: f32[4,2]) -> f32[4,2] {{
  %a = f32[4,2] parameter(0)
  %first = s32[] constant(0)
  %none = f32[] constant(0)
  %zero = {zero}
  %start = (s32[], f32[4,2], f32[4,2]) tuple(%first, %zero, %a)
  %w = (s32[], f32[4,2], f32[4,2]) while(%start), condition=%condition, body=%body{trips}
  {behind}
}}
"""
    return read_module(re.sub(r"\n +\n", "\n", text), scheduled=False)


def hoisted(plain: Module) -> Module:
    """As XLA reads it."""
    module = hoist_sums(plain)
    text_of(module)
    return module


def all_reduces(module: Module) -> list[tuple[str, str]]:
    """Computation and name of each."""
    ops = ((name, op) for name, body in module.items() for op in body.ops.values())
    return [(name, op.name) for name, op in ops if op.opcode == "all-reduce"]


def test_the_loop_adds_terms_and_their_total_is_summed_once() -> None:
    module = hoisted(loop())
    assert module["body"].ops["more"].operands == ("acc", "t")
    assert all_reduces(module) == [("main", "out")]
    assert short_lines_of(module)[-4:] == [
        "%w = (s32[], f32[4,2], f32[4,2]) while(%start), condition=%condition, body=%body",
        "%s.trips1 = f32[4,2] get-tuple-element(%w), index=1",
        f"%out = f32[4,2] all-reduce(%s.trips1), {SUMMED.replace('=3', '=4')}",
        "ROOT %r = f32[4,2] negate(%out)",
    ]
    assert [module.entry.ops[name].op_name for name in ("s.trips1", "out")] == [ORIGIN] * 2


def test_elements_that_only_change_places() -> None:
    moved = f"""%u = f32[2,4] transpose(%t), dimensions={{1,0}}
  %s = f32[2,4] all-reduce(%u), {SUMMED}
  %turned = f32[4,2] transpose(%s), dimensions={{1,0}}
  %copied = f32[4,2] copy(%turned)"""
    module = hoisted(loop(moved, "f32[4,2] add(%copied, %acc)"))
    assert module["body"].ops["turned"].operands == ("u",)
    assert module["body"].ops["more"].operands == ("copied", "acc")
    assert module.entry.ops["out"].shape == module.entry.ops["a"].shape
    assert module.entry.ops["out"].opcode == "all-reduce"


def test_two_readers_have_sums_on_channels_of_their_own() -> None:
    behind = """%out = f32[4,2] get-tuple-element(%w), index=1
  %out2 = f32[4,2] get-tuple-element(%w), index=1
  ROOT %r = f32[4,2] multiply(%out, %out2)"""
    entry = hoisted(loop(behind=behind)).entry
    assert [op.channel for op in entry.ops.values() if op.channel is not None] == [4, 5]


def test_a_sum_that_nobody_reads_goes() -> None:
    module = hoisted(loop(behind="ROOT %r = f32[4,2] get-tuple-element(%w), index=2"))
    assert not all_reduces(module)


def test_zeros_one_by_one() -> None:
    plain = loop(zero="f32[4,2] constant({ {0, 0}, {0, 0}, {-0.0, 0}, {0, 0} })")
    assert all_reduces(hoisted(plain)) == [("main", "out")]


@pytest.mark.parametrize(
    "stays",
    [
        loop(zero="f32[4,2] negate(%a)"),
        loop(zero="f32[4,2] constant({ {0, 0}, {0, 0}, {0, 1}, {0, 0} })"),
        loop(add="f32[4,2] multiply(%acc, %s)"),
        loop(add="f32[4,2] add(%s, %s)"),
        loop(add="f32[4,2] add(%v, %s)"),
        loop(body=f"%s = f32[4,2] all-reduce(%t), {SUMMED.replace('%add', '%most')}"),
        loop(body=f"%s0 = f32[4,2] all-reduce(%t), {SUMMED}\n  %s = f32[4,2] negate(%s0)"),
        loop(body=f"%s = f32[4,2] all-reduce(%t), {SUMMED}\n  %log = f32[4,2] negate(%s)"),
        loop(body=f"%s = f32[4,2] all-reduce(%t), {SUMMED}\n  %log = f32[4,2] negate(%acc)"),
        loop(body=f"%s = f32[4,2] all-reduce(%t), {SUMMED}\n  %again = f32[4,2] get-tuple-element(%state), index=1"),
        loop(body=f"%s = f32[4,2] all-reduce(%t), {SUMMED}\n  %all = {STATE} copy(%state)"),
        loop(body=f"%s = f32[4,2] all-reduce(%t), {SUMMED}, control-predecessors={{%i}}"),
        loop(condition="%seen = f32[4,2] get-tuple-element(%given), index=1"),
        loop(trips=', backend_config={"known_trip_count":{"n":"1"}}'),
        loop(behind=f"%all = {STATE} copy(%w)\n  ROOT %r = f32[4,2] get-tuple-element(%all), index=1"),
    ],
    ids=[
        "starts from something",
        "starts from one",
        "multiplied",
        "twice",
        "added to another",
        "largest",
        "changed on the way",
        "sum is read",
        "carry is read",
        "carry is read twice",
        "state is read as a whole",
        "ordered",
        "condition reads it",
        "runs once",
        "result is read as a whole",
    ],
)  # fmt: skip
def test_which_stay(stays: Module) -> None:
    assert hoisted(stays) is stays


def test_a_body_that_two_loops_have_stays() -> None:
    again = f"%w2 = {STATE} while(%w), condition=%condition, body=%body\n  "
    behind = "%out = f32[4,2] get-tuple-element(%w2), index=1\n  ROOT %r = f32[4,2] negate(%out)"
    both = loop(behind=again + behind)
    assert hoisted(both) is both


def test_inner_loops_first() -> None:
    """What the inner loop adds up is a sum of the outer body then, and moves again."""
    plain = loop()
    bodies = ((name, texts_of(plain)[name]) for name in ("body", "condition"))
    inner = "".join(f"\n%{name} () -> () {{\n{body}\n}}\n" for name, body in bodies)
    inner = inner.replace("%", "%inner_")
    runs = f"""%zeros = f32[4,2] broadcast(%zero1), dimensions={{}}
  %inside = {STATE} tuple(%zero2, %zeros, %v)
  %inner = {STATE} while(%inside), condition=%inner_condition, body=%inner_body
  %s = f32[4,2] get-tuple-element(%inner), index=1"""
    body = f"%zero1 = f32[] constant(0)\n  %zero2 = s32[] constant(0)\n  {runs}"
    module = hoisted(loop(body, inner=inner.replace("%inner_add", "%add")))
    assert [name for name, _ in all_reduces(module)] == ["main"]
    assert module["body"].ops["more"].operands[1] == "inner_s.trips1"
