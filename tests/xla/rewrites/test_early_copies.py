"""Loops that copy beside all of a trip: the same instructions, each behind what it reads and waits for."""

from __future__ import annotations

from memplan.verify.same_module import judge
from memplan.xla.module import Module
from memplan.xla.rewrites.early_copies import copy_early
from tests.hlo import read_module, texts_of

FETCH = "((f32[8,4]{1,0:S(5)}, s32[]), f32[1,4]{1,0}, u32[])"
TEXT = f"""HloModule jit_step, is_scheduled=true, entry_computation_layout={{()->f32[1,4]{{1,0}}}}

%sliced (p0: f32[8,4], p1: s32[]) -> f32[1,4] {{
  %p0 = f32[8,4]{{1,0:S(5)}} parameter(0)
  %p1 = s32[] parameter(1)
  ROOT %slice = f32[1,4]{{1,0}} dynamic-slice(%p0, %p1, %p1), dynamic_slice_sizes={{1,4}}
}}

%body (carry: (s32[], f32[1,4], f32[8,4])) -> (s32[], f32[1,4], f32[8,4]) {{
  %carry = (s32[], f32[1,4]{{1,0}}, f32[8,4]{{1,0:S(5)}}) parameter(0)
  %window = f32[1,4]{{1,0}} get-tuple-element(%carry), index=1
  %first = f32[1,4]{{1,0}} negate(%window)
  %second = f32[1,4]{{1,0}} negate(%first)
  %trip = s32[] get-tuple-element(%carry), index=0
  %stack = f32[8,4]{{1,0:S(5)}} get-tuple-element(%carry), index=2
  %fetch-start = {FETCH} fusion-start(%stack, %trip), kind=kLoop, calls=%sliced, control-predecessors={{%first}}
  %fetch-done = f32[1,4]{{1,0}} fusion-done(%fetch-start)
  %third = f32[1,4]{{1,0}} negate(%second)
  %next = f32[1,4]{{1,0}} add(%fetch-done, %third)
  ROOT %result = (s32[], f32[1,4]{{1,0}}, f32[8,4]{{1,0:S(5)}}) tuple(%trip, %next, %stack)
}}

%condition (carry.1: (s32[], f32[1,4], f32[8,4])) -> pred[] {{
  %carry.1 = (s32[], f32[1,4]{{1,0}}, f32[8,4]{{1,0:S(5)}}) parameter(0)
  ROOT %more = pred[] constant(false)
}}

ENTRY %main () -> f32[1,4] {{
  %begin = (s32[], f32[1,4]{{1,0}}, f32[8,4]{{1,0:S(5)}}) constant((0, {{{{0,0,0,0}}}}, {{...}}))
  %loop = (s32[], f32[1,4]{{1,0}}, f32[8,4]{{1,0:S(5)}}) while(%begin), condition=%condition, body=%body
  ROOT %out = f32[1,4]{{1,0}} get-tuple-element(%loop), index=1
}}
"""
LATE = [
    "carry",
    "window",
    "first",
    "second",
    "trip",
    "stack",
    "fetch-start",
    "fetch-done",
    "third",
    "next",
    "result",
]
EARLY = [
    "carry",
    "trip",
    "stack",
    "window",
    "first",
    "fetch-start",
    "second",
    "third",
    "fetch-done",
    "next",
    "result",
]


def test_a_copy_begins_when_it_may_and_is_awaited_when_it_has_to_be() -> None:
    module = read_module(TEXT)
    assert list(module["body"].ops) == LATE
    moved = copy_early(module)
    assert list(moved["body"].ops) == EARLY
    assert moved["body"].ops == module["body"].ops
    assert {name: text for name, text in texts_of(moved).items() if name != "body"} == {
        name: text for name, text in texts_of(module).items() if name != "body"
    }


def test_copies_on_the_device_stay_where_they_are() -> None:
    module = read_module(TEXT.replace(":S(5)", ""))
    assert texts_of(copy_early(module)) == texts_of(module)


def test_what_the_next_trip_gets_is_not_written_over_what_is_still_read() -> None:
    """The fetched row itself is carried: it takes the place of the window, which `first` reads last."""
    module = read_module(
        TEXT.replace(", control-predecessors={%first}", "").replace(
            "(%trip, %next, %stack)", "(%trip, %fetch-done, %stack)"
        )
    )
    order = list(copy_early(module)["body"].ops)
    assert order.index("first") < order.index("fetch-start") < order.index("second")


def test_what_a_copy_still_reads_is_not_written_over() -> None:
    """The window itself is copied out, until the next one is written."""
    out = "((f32[1,4]{1,0}), f32[1,4]{1,0:S(5)}, u32[])"
    before, _, tail = TEXT.partition("  %fetch-start")
    text = f"""{before}  %out-start = {out} copy-start(%window)
  %out-done = f32[1,4]{{1,0:S(5)}} copy-done(%out-start)
  %next = f32[1,4]{{1,0}} negate(%second)
{tail.partition("third)")[2].lstrip()}"""
    module = read_module(text)
    moved = copy_early(module)
    judge(module, moved)
    order = list(moved["body"].ops)
    assert (
        order.index("out-start")
        < order.index("first")
        < order.index("out-done")
        < order.index("next")
    )


NUMBERS = """%numbers (q0: s32[]) -> (s32[], s32[]) {
  %q0 = s32[] parameter(0)
  %one = s32[] constant(1)
  %sum = s32[] add(%q0, %one)
  %double = s32[] add(%sum, %sum)
  ROOT %both = (s32[], s32[]) tuple(%sum, %double)
}

"""
LATE_PLACE = f"""  %made = (s32[], s32[]) fusion(%trip), kind=kLoop, calls=%numbers, control-predecessors={{%shifted}}
  %later = s32[] get-tuple-element(%made), index=0
  %place = s32[] get-tuple-element(%made), index=1
  %fetch-start = {FETCH} fusion-start(%stack, %place), kind=kLoop, calls=%sliced
"""
SHIFTED = """  %wide = s32[1,4]{1,0} broadcast(%trip), dimensions={}
  %shifted = s32[1,4]{1,0} negate(%wide)
"""


def with_a_late_place() -> Module:
    """The next trip's number is made with the place of what is fetched for it, and written over this trip's."""
    before, _, tail = TEXT.partition("  %fetch-start")
    text = before + SHIFTED + LATE_PLACE + tail.partition("\n")[2]
    text = text.replace("%body (", NUMBERS + "%body (").replace(
        "(%trip, %next, %stack)", "(%later, %next, %stack)"
    )
    return read_module(text)


def test_a_copy_does_not_wait_until_this_trip_s_number_is_written_over() -> None:
    moved = copy_early(module := with_a_late_place())
    judge(module, moved)
    order = list(moved["body"].ops)
    # Of what makes the place alone, `trip` is read before it is written over.
    assert (
        order.index("made.alone1")
        < order.index("fetch-start")
        < order.index("wide")
        < order.index("made")
    )
    place = moved["body"].ops[moved["body"].ops["fetch-start"].operands[1]]
    assert place.operands == ("trip",)
    assert [op.opcode for op in moved[place.called[0]].ops.values()].count("add") == 2
    assert not place.predecessors
