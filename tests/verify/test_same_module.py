"""The judge accepts clones, copies and another order, and kills every mutant that computes or reads otherwise."""

from __future__ import annotations

import pytest

from memplan.verify.dataflow import NotThePlainModuleError
from memplan.verify.same_module import judge
from tests.hlo import read_module

HEAD = "HloModule jit_step, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }"
BODIES = """
%add.0 (s: f32[], t: f32[]) -> f32[] {
  %s = f32[] parameter(0)
  %t = f32[] parameter(1)
  ROOT %u = f32[] add(%s, %t)
}

%tanh.0 (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %q = f32[8]{0} tanh(%p)
}

%sine.0 (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %q = f32[8]{0} sine(%p)
}

%sub.0 (p: f32[8], r: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %r = f32[8]{0} parameter(1)
  ROOT %q = f32[8]{0} subtract(%p, %r)
}

%put.0 (p: f32[8], r: f32[1], i: s32[]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %r = f32[1]{0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %q = f32[8]{0} dynamic-update-slice(%p, %r, %i)
}

%more.0 (p: (s32[], f32[8], f32[8])) -> pred[] {
  %p = (s32[], f32[8]{0}, f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] constant(3)
  ROOT %q = pred[] compare(%i, %n), direction=LT
}

%once.0 (p: (s32[], f32[8], f32[8])) -> (s32[], f32[8], f32[8]) {
  %p = (s32[], f32[8]{0}, f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %v = f32[8]{0} get-tuple-element(%p), index=1
  %k = f32[8]{0} get-tuple-element(%p), index=2
  %one = s32[] constant(1)
  %j = s32[] add(%i, %one)
  %z = f32[8]{0} add(%v, %k)
  ROOT %q = (s32[], f32[8]{0}, f32[8]{0}) tuple(%j, %z, %k)
}
"""
SPACE = "f32[8]{0:S(5)}"
BEGIN = """
ENTRY %main (w: f32[8], x: f32[8], key: u64[2]) -> (f32[8], f32[8], f32[8]) {
  %w = f32[8]{0} parameter(0)
  %x = f32[8]{0} parameter(1)
  %key = u64[2]{0} parameter(2)
  %zero = s32[] constant(0)
  %two = s32[] constant(2)
  %a = f32[8]{0} fusion(%w, %x), kind=kLoop, calls=%sub.0, metadata={op_name="a" stack_frame_id=3}
  %b = f32[8]{0} fusion(%a), kind=kLoop, calls=%tanh.0
"""
ENDING = """
  ROOT %out = (f32[8]{0}, f32[8]{0}, f32[8]{0}) tuple(%new, %loop.1, %after)
}
"""
PLAIN = f"""{HEAD}
{BODIES}{BEGIN}  %draw = (u64[2]{{0}}, f32[8]{{0}}) rng-bit-generator(%key), algorithm=rng_default
  %drawn = f32[8]{{0}} get-tuple-element(%draw), index=1
  %said = f32[8]{{0}} custom-call(%drawn), custom_call_target="say", custom_call_has_side_effect=true
  %loud = f32[8]{{0}} custom-call(%said), custom_call_target="shout", custom_call_has_side_effect=true
  %state = (s32[], f32[8]{{0}}, f32[8]{{0}}) tuple(%zero, %loud, %x)
  %loop = (s32[], f32[8]{{0}}, f32[8]{{0}}) while(%state), condition=%more.0, body=%once.0
  %loop.1 = f32[8]{{0}} get-tuple-element(%loop), index=1
  %c = f32[8]{{0}} fusion(%b), kind=kLoop, calls=%sine.0
  %one = f32[1]{{0}} slice(%x), slice={{[0:1]}}
  %new = f32[8]{{0}} fusion(%w, %c), kind=kLoop, calls=%sub.0
  %put = f32[8]{{0}} fusion(%c, %one, %two), kind=kLoop, calls=%put.0
  %after = f32[8]{{0}} fusion(%b, %put), kind=kLoop, calls=%sub.0
{ENDING.lstrip()}"""
PLANNED = f"""{HEAD}
{BODIES}
%tanh.0.run2 (p: f32[8]) -> f32[8] {{
  %p = f32[8]{{0}} parameter(0)
  ROOT %q = f32[8]{{0}} tanh(%p)
}}
{BEGIN}  %go = ({SPACE}, f32[8]{{0}}, u32[]) copy-start(%a)
  %gone = {SPACE} copy-done(%go)
  %c = f32[8]{{0}} fusion(%b), kind=kLoop, calls=%sine.0
  %draw = (u64[2]{{0}}, f32[8]{{0}}) rng-bit-generator(%key), algorithm=rng_default
  %drawn = f32[8]{{0}} get-tuple-element(%draw), index=1
  %said = f32[8]{{0}} custom-call(%drawn), custom_call_target="say", custom_call_has_side_effect=true
  %loud = f32[8]{{0}} custom-call(%said), custom_call_target="shout", custom_call_has_side_effect=true
  %state = (s32[], f32[8]{{0}}, f32[8]{{0}}) tuple(%zero, %loud, %x)
  %loop = (s32[], f32[8]{{0}}, f32[8]{{0}}) while(%state), condition=%more.0, body=%once.0
  %loop.1 = f32[8]{{0}} get-tuple-element(%loop), index=1
  %come = (f32[8]{{0}}, {SPACE}, u32[]) copy-start(%gone)
  %one = f32[1]{{0}} slice(%x), slice={{[0:1]}}
  %new = f32[8]{{0}} fusion(%w, %c), kind=kLoop, calls=%sub.0
  %put = f32[8]{{0}} fusion(%c, %one, %two), kind=kLoop, calls=%put.0
  %came = f32[8]{{0}} copy-done(%come)
  %b.run2 = f32[8]{{0}} fusion(%came), kind=kLoop, calls=%tanh.0.run2
  %after = f32[8]{{0}} fusion(%b.run2, %put), kind=kLoop, calls=%sub.0
{ENDING.lstrip()}"""
LOOP = "  %loop = (s32[], f32[8]{0}, f32[8]{0}) while(%state), condition=%more.0, body=%once.0\n"
NEW = "  %new = f32[8]{0} fusion(%w, %c), kind=kLoop, calls=%sub.0\n"
PUT = "  %put = f32[8]{0} fusion(%c, %one, %two), kind=kLoop, calls=%put.0\n"
SAID = '  %said = f32[8]{0} custom-call(%drawn), custom_call_target="say", custom_call_has_side_effect=true\n'
LOUD = '  %loud = f32[8]{0} custom-call(%said), custom_call_target="shout", custom_call_has_side_effect=true\n'
CLONE = "  %b.run2 = f32[8]{0} fusion(%came), kind=kLoop, calls=%tanh.0.run2\n"
CAME = "  %came = f32[8]{0} copy-done(%come)\n"
GONE = f"  %gone = {SPACE} copy-done(%go)\n"
DRAW = "  %draw = (u64[2]{0}, f32[8]{0}) rng-bit-generator(%key), algorithm=rng_default\n"
BODY_ENDS = "ROOT %q = f32[8]{0} tanh(%p)\n}\n\nENTRY"

Edit = tuple[str, str]
MUTANTS: dict[str, tuple[Edit, ...]] = {
    "a clone reads the donated argument behind its overwrite": (
        (CLONE, "  %a.run2 = f32[8]{0} fusion(%w, %x), kind=kLoop, calls=%sub.0\n" + CLONE.replace("%came", "%a.run2")),
    ),
    "the overwrite comes before a reader of the argument": (
        (NEW, ""),
        ("  %draw =", "  %early = f32[8]{0} bitcast(%w)\n  %draw ="),
        (CAME, NEW + CAME + "  %a.run2 = f32[8]{0} fusion(%early, %x), kind=kLoop, calls=%sub.0\n"),
    ),
    "a clone reads what was updated in place": (
        (CLONE, CLONE + NEW.replace("%new =", "%new.run2 =")),
    ),
    "an old value is read behind its update": ((NEW, ""), (CAME, NEW + CAME)),
    "an update in place runs twice": ((PUT, PUT + PUT.replace("%put =", "%put.run2 =")),),
    "a loop's first state is read behind the loop": (
        (LOOP, LOOP + "  %c.run2 = f32[8]{0} fusion(%loud), kind=kLoop, calls=%sine.0\n"),
    ),
    "a loop runs twice": ((LOOP, LOOP + LOOP.replace("%loop =", "%loop.run2 =")),),
    "a loop with another body": (("body=%once.0\n  %loop.1", "body=%twice.0\n  %loop.1"), ("%add.0 (s", "%twice.0 (s")),
    "a stale operand": (("fusion(%b.run2, %put)", "fusion(%a, %put)"),),
    "swapped operands": (("fusion(%b.run2, %put)", "fusion(%put, %b.run2)"),),
    "swapped copies": (("copy-start(%a)", "copy-start(%b)"),),
    "a copy that comes from the wrong one": (("copy-start(%gone)", "copy-start(%c)"),),
    "a copy to the host that nobody waits for": ((GONE, ""), ("copy-start(%gone)", "copy-start(%go)")),
    "a copy back that nobody waits for": ((CAME, ""), ("fusion(%came)", "fusion(%come)")),
    "an element of a copy under way": (
        (CAME, "  %came = f32[8]{0} get-tuple-element(%come), index=0\n"),
    ),
    "a copy that is ended twice": ((CAME, CAME + CAME.replace("%came =", "%came.2 =")),),
    "a copy that is read before it has come": ((CAME, ""), (CLONE, CLONE + CAME)),
    "a clone before its operand": ((CLONE, ""), (CAME, CLONE + CAME)),
    "a clone of another kernel": (("calls=%tanh.0.run2", "calls=%sine.0"),),
    "a clone with another body": ((BODY_ENDS, BODY_ENDS.replace("tanh", "sine")),),
    "a clone by another compiler": ((CLONE, CLONE.replace("kLoop", "kCustom")),),
    "a clone in another type": ((CLONE, CLONE.replace("f32[8]", "bf16[8]")),),
    "a clone of what acts": ((SAID, SAID + SAID.replace("%said =", "%said.run2 =")),),
    "what acts is left out": ((SAID, ""), ("custom-call(%said)", "custom-call(%drawn)")),
    "what acts changes its order": (
        (SAID, ""),
        (LOUD, LOUD.replace("%said", "%drawn") + SAID.replace("%drawn", "%loud")),
        ("%loud, %x)", "%said, %x)"),
    ),
    "random state drawn twice": ((DRAW, DRAW + DRAW.replace("%draw =", "%draw.run2 =")),),
    "another algorithm draws": ((DRAW, DRAW.replace("rng_default", "rng_philox")),),
    "another constant": (("%two = s32[] constant(2)", "%two = s32[] constant(3)"),),
    "another argument": (
        ("%w = f32[8]{0} parameter(0)", "%w = f32[8]{0} parameter(1)"),
        ("%x = f32[8]{0} parameter(1)", "%x = f32[8]{0} parameter(0)"),
    ),
    "another output": (("%loop.1, %after)", "%loop.1, %put)"),),
    "outputs in another order": (("%loop.1, %after)", "%after, %loop.1)"),),
    "another element of a tuple": (("(%loop), index=1", "(%loop), index=2"),),
    "another argument is donated": (("(0, {}, may-alias)", "(1, {}, may-alias)"),),
    "nothing is donated": ((", input_output_alias={ {0}: (0, {}, may-alias) }", ""),),
}  # fmt: skip


STATE = "(s32[], f32[8]{0}, f32[8]{0}, f32[8]{0})"
OPENING = f"""
%body.0 (p: (s32[], f32[8], f32[8], f32[8])) -> (s32[], f32[8], f32[8], f32[8]) {{
  %p = {STATE} parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %v = f32[8]{{0}} get-tuple-element(%p), index=1
  %k = f32[8]{{0}} get-tuple-element(%p), index=2
  %s = f32[8]{{0}} get-tuple-element(%p), index=3
  %one = s32[] constant(1)
  %h = f32[8]{{0}} fusion(%v), kind=kLoop, calls=%tanh.0
  %g = f32[8]{{0}} fusion(%h), kind=kLoop, calls=%sine.0
"""
IN_PLACE = "  %t = f32[8]{0} fusion(%s, %part, %i), kind=kLoop, calls=%put.0\n"
COUNTER = "  %j = s32[] add(%i, %one)\n"
SAYS = '  %loud = f32[8]{0} custom-call(%g), custom_call_target="say", custom_call_has_side_effect=true\n'
AGAIN = "  %g.run2 = f32[8]{0} fusion(%h), kind=kLoop, calls=%sine.0.run2\n"
DIFFERENCE = "  %w = f32[8]{0} fusion(%s, %k), kind=kLoop, calls=%sub.0\n"
CARRIED = "  %z = f32[8]{0} fusion(%d, %back), kind=kLoop, calls=%sub.0\n"
FETCHED = "  %back = f32[8]{0} copy-done(%fetch)\n"
SENT = f"  %sent = {SPACE} copy-done(%send)\n"
CLOSING = f"""  ROOT %q = {STATE} tuple(%j, %z, %k, %t)
}}
"""
WHILE = f"""
%while.0 (p: (s32[], f32[8], f32[8], f32[8])) -> pred[] {{
  %p = {STATE} parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] constant(3)
  ROOT %q = pred[] compare(%i, %n), direction=LT
}}

ENTRY %main (a: f32[8], b: f32[8], x: f32[8]) -> (f32[8], f32[8], f32[8], f32[8]) {{
  %a = f32[8]{{0}} parameter(0)
  %b = f32[8]{{0}} parameter(1)
  %x = f32[8]{{0}} parameter(2)
  %zero = s32[] constant(0)
  %y = f32[8]{{0}} fusion(%x), kind=kLoop, calls=%tanh.0
  %m = f32[8]{{0}} fusion(%x), kind=kLoop, calls=%sine.0
  %state = {STATE} tuple(%zero, %y, %a, %m)
  %loop = {STATE} while(%state), condition=%while.0, body=%body.0, backend_config={{"known_trip_count":{{"n":"3"}}}}
  %loop.1 = f32[8]{{0}} get-tuple-element(%loop), index=1
  %loop.2 = f32[8]{{0}} get-tuple-element(%loop), index=2
  %loop.3 = f32[8]{{0}} get-tuple-element(%loop), index=3
  %some = f32[1]{{0}} slice(%loop.1), slice={{[0:1]}}
  %all = f32[8]{{0}} all-reduce-start(%loop.3), to_apply=%add.0
"""
SUMMED = "  %sum = f32[8]{0} all-reduce-done(%all)\n"
LATER = "  %later = f32[8]{0} fusion(%loop.3, %some, %zero), kind=kLoop, calls=%put.0\n"
LAST = "  %last = f32[8]{0} fusion(%loop.2, %sum), kind=kLoop, calls=%sub.0\n"
PUT_B = "  %put = f32[8]{0} fusion(%b, %some, %zero), kind=kLoop, calls=%put.0\n"
READ_B = "  %read = f32[8]{0} fusion(%put, %sum), kind=kLoop, calls=%sub.0\n"
NEW_A = "  %new.a = f32[8]{0} fusion(%last, %later), kind=kLoop, calls=%sub.0\n"
NEW_B = "  %new.b = f32[8]{0} fusion(%read, %later), kind=kLoop, calls=%sub.0\n"
ENDS = "  %ends = f32[8]{0} fusion(%last, %read), kind=kLoop, calls=%sub.0\n"
GIVES_BACK = f"""  %leave = ({SPACE}, f32[8]{{0}}, u32[]) copy-start(%new.b)
  %left = {SPACE} copy-done(%leave)
"""
TAKES = f"  %take = (f32[8]{{0}}, {SPACE}, u32[]) copy-start(%left)\n"
TAKEN = "  %taken = f32[8]{0} copy-done(%take)\n"
LOOP_HEAD = (
    "HloModule jit_loop, is_scheduled=true, "
    "input_output_alias={ {0}: (0, {}, may-alias), {1}: (1, {}, may-alias) }"
)


def returned(second: str) -> str:
    arrays = ", ".join(["f32[8]{0}"] * 4)
    return f"  ROOT %out = ({arrays}) tuple(%new.a, %{second}, %ends, %later)\n}}\n"


PLAIN_LOOP = f"""{LOOP_HEAD}
{BODIES}{OPENING}{SAYS}{DIFFERENCE}  %d = f32[8]{{0}} fusion(%loud, %w), kind=kLoop, calls=%sub.0
  %part = f32[1]{{0}} slice(%g), slice={{[0:1]}}
{IN_PLACE}{CARRIED.replace("%back", "%h")}{COUNTER}{CLOSING}{WHILE}{SUMMED}{LATER}{LAST}{PUT_B}{READ_B}{ENDS}\
{NEW_A}{NEW_B}{returned("new.b")}"""
PLANNED_LOOP = f"""{LOOP_HEAD}
{BODIES}
%sine.0.run2 (p: f32[8]) -> f32[8] {{
  %p = f32[8]{{0}} parameter(0)
  ROOT %q = f32[8]{{0}} sine(%p)
}}
{OPENING}  %send = ({SPACE}, f32[8]{{0}}, u32[]) copy-start(%h)
{SAYS}{AGAIN}{SENT}  %part = f32[1]{{0}} slice(%g.run2), slice={{[0:1]}}
{DIFFERENCE}  %fetch = (f32[8]{{0}}, {SPACE}, u32[]) copy-start(%sent)
{IN_PLACE}  %d = f32[8]{{0}} fusion(%loud, %w), kind=kLoop, calls=%sub.0
{COUNTER}{FETCHED}{CARRIED}{CLOSING}{WHILE}{SUMMED}{LAST}{LATER}{PUT_B}{READ_B}{NEW_B}{GIVES_BACK}{ENDS}{NEW_A}{TAKES}{TAKEN}{returned("taken")}"""
BODY_CLONE = "%sine.0.run2 (p: f32[8]) -> f32[8] {\n  %p = f32[8]{0} parameter(0)\n  ROOT %q = f32[8]{0} sine(%p)"
LOOP_MUTANTS: dict[str, tuple[Edit, ...]] = {
    "a clone reads what the body carries behind its overwrite": (
        (CARRIED, CARRIED + "  %h.run2 = f32[8]{0} fusion(%v), kind=kLoop, calls=%tanh.0\n"),
    ),
    "the body's new state is made before a reader of the old": (
        (COUNTER + FETCHED, FETCHED),
        (IN_PLACE, COUNTER + IN_PLACE),
    ),
    "a copy of what the body carries ends behind its overwrite": (
        (CARRIED, f"  %go = ({SPACE}, f32[8]{{0}}, u32[]) copy-start(%v)\n{CARRIED}  %gone = {SPACE} copy-done(%go)\n"),
    ),
    "a body's clone reads what was updated in place": (
        (IN_PLACE, IN_PLACE + DIFFERENCE.replace("%w =", "%w.run2 =")),
    ),
    "a body's value is read behind its update": ((DIFFERENCE, ""), (IN_PLACE, IN_PLACE + DIFFERENCE)),
    "a body updates twice": ((IN_PLACE, IN_PLACE + IN_PLACE.replace("%t =", "%t.run2 =")),),
    "a body acts twice": ((SAYS, SAYS + SAYS.replace("%loud =", "%loud.run2 =")),),
    "a body does not act": ((SAYS, ""), ("fusion(%loud, %w)", "fusion(%g, %w)")),
    "a stale operand in a body": (("fusion(%d, %back)", "fusion(%d, %g)"),),
    "swapped operands in a body": (("fusion(%d, %back)", "fusion(%back, %d)"),),
    "another copy in a body": (("copy-start(%h)", "copy-start(%g)"),),
    "a body's copy back from the wrong one": (("copy-start(%sent)", "copy-start(%g)"),),
    "a body's copy to the host that nobody waits for": ((SENT, ""), ("copy-start(%sent)", "copy-start(%send)")),
    "a body's copy back that nobody waits for": ((FETCHED, ""), ("fusion(%d, %back)", "fusion(%d, %fetch)")),
    "a body's copy that is read before it has come": ((FETCHED, ""), (CARRIED, CARRIED + FETCHED)),
    "a body's copy that is ended twice": ((FETCHED, FETCHED + FETCHED.replace("%back =", "%back.2 =")),),
    "a copy that the body begins and never ends": (
        (FETCHED, FETCHED + f"  %more = ({SPACE}, f32[8]{{0}}, u32[]) copy-start(%g)\n"),
    ),
    "a body's clone before its operand": ((AGAIN, ""), ("  %h = f32", AGAIN + "  %h = f32")),
    "a body's clone with another body": ((BODY_CLONE, BODY_CLONE.replace("sine(", "cosine(")),),
    "a body's clone by another compiler": ((AGAIN, AGAIN.replace("kLoop", "kCustom")),),
    "another state of a body": (("tuple(%j, %z, %k, %t)", "tuple(%j, %d, %k, %t)"),),
    "the state of a body in another order": (("tuple(%j, %z, %k, %t)", "tuple(%j, %k, %z, %t)"),),
    "what a body hands on": (("tuple(%j, %z, %k, %t)", "tuple(%j, %z, %w, %t)"),),
    "a body that counts otherwise": (("%one = s32[] constant(1)", "%one = s32[] constant(2)"),),
    "another condition": (("direction=LT\n}\n\nENTRY", "direction=LE\n}\n\nENTRY"),),
    "another number of trips": (('"n":"3"', '"n":"4"'),),
    "another leaf of what a body is given": (("%p), index=1\n", "%p), index=3\n"),),
    "what a loop handed on is read behind the overwrite of the argument": (
        (NEW_A, NEW_A + LAST.replace("%last =", "%last.run2 =")),
    ),
    "an update of an argument is read behind its overwrite": (
        (NEW_B, NEW_B + READ_B.replace("%read =", "%read.run2 =")),
        (returned("taken"), returned("new.b")),
    ),
    "an output comes back over an argument's update that is still read": (
        (TAKEN, READ_B.replace("%read =", "%read.run2 =") + TAKEN),
    ),
    "what is under way to other devices is updated": ((SUMMED + LAST + LATER, LATER + SUMMED + LAST),),
}  # fmt: skip


def test_the_plain_module_is_itself() -> None:
    judge(read_module(PLAIN), read_module(PLAIN))


def test_clones_copies_and_another_order_are_the_plain_module() -> None:
    judge(read_module(PLAIN), read_module(PLANNED))


def test_loops_whose_bodies_have_clones_copies_and_another_order_are_the_plain_module() -> None:
    judge(read_module(PLAIN_LOOP), read_module(PLAIN_LOOP))
    judge(read_module(PLAIN_LOOP), read_module(PLANNED_LOOP))


STREAM = "(s32[], f32[1]{0}, f32[8]{0:S(5)}, f32[8]{0:S(5)})"


def fetch(number: int, place: str) -> str:
    shape = f"(({SPACE}, s32[]), f32[1]{{0}}, u32[])"
    return f"  %go.{number} = {shape} fusion-start(%r, %{place}), kind=kLoop, calls=%take.0\n"


STORE = f"""\
  %put = (({SPACE}, f32[1]{{0}}, s32[]), {SPACE}, u32[]) fusion-start(%s, %v, %i), kind=kLoop, calls=%put.0
  %t = {SPACE} fusion-done(%put)
"""
READ_STACK = f"  %old = (({SPACE}, s32[]), f32[1]{{0}}, u32[]) fusion-start(%s, %j), kind=kLoop, calls=%take.0\n"
OLD = "  %was = f32[1]{0} fusion-done(%old)\n"
STREAM_BEGINS = f"""HloModule jit_stream, is_scheduled=true
{BODIES}
%take.0 (p: f32[8], i: s32[]) -> f32[1] {{
  %p = {SPACE} parameter(0)
  %i = s32[] parameter(1)
  ROOT %q = f32[1]{{0}} dynamic-slice(%p, %i), dynamic_slice_sizes={{1}}
}}

%body.0 (p: (s32[], f32[1], f32[8], f32[8])) -> (s32[], f32[1], f32[8], f32[8]) {{
  %p = {STREAM} parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %v = f32[1]{{0}} get-tuple-element(%p), index=1
  %r = {SPACE} get-tuple-element(%p), index=2
  %s = {SPACE} get-tuple-element(%p), index=3
  %one = s32[] constant(1)
  %j = s32[] add(%i, %one)
"""
STREAM_ENDS = f"""\
  %come.1 = f32[1]{{0}} fusion-done(%go.1)
  %come.2 = f32[1]{{0}} fusion-done(%go.2)
  %a = f32[1]{{0}} add(%come.1, %come.2)
  %z = f32[1]{{0}} add(%a, %was)
  ROOT %q = {STREAM} tuple(%j, %z, %r, %t)
}}

%while.0 (p: (s32[], f32[1], f32[8], f32[8])) -> pred[] {{
  %p = {STREAM} parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] constant(3)
  ROOT %q = pred[] compare(%i, %n), direction=LT
}}

ENTRY %main (v: f32[1], r: f32[8], s: f32[8]) -> f32[1] {{
  %v = f32[1]{{0}} parameter(0)
  %r = {SPACE} parameter(1)
  %s = {SPACE} parameter(2)
  %i = s32[] constant(0)
  %state = {STREAM} tuple(%i, %v, %r, %s)
  %loop = {STREAM} while(%state), condition=%while.0, body=%body.0
  ROOT %out = f32[1]{{0}} get-tuple-element(%loop), index=1
}}
"""
PLAIN_STREAM = (
    STREAM_BEGINS + READ_STACK + OLD + fetch(1, "i") + STORE + fetch(2, "j") + STREAM_ENDS
)
EARLY_STREAM = (
    STREAM_BEGINS + fetch(2, "j") + fetch(1, "i") + READ_STACK + OLD + STORE + STREAM_ENDS
)


def test_copies_of_a_loop_may_begin_in_another_order() -> None:
    judge(read_module(PLAIN_STREAM), read_module(EARLY_STREAM))


@pytest.mark.parametrize(
    "edits",
    [
        ((READ_STACK + OLD, ""), (STORE, STORE + READ_STACK + OLD)),
        ((OLD, ""), (STORE, STORE + OLD)),
        ((fetch(1, "i"), fetch(1, "i") + fetch(1, "i").replace("%go.1 =", "%go.3 =")),),
        ((fetch(1, "i"), fetch(1, "j")),),
        ((STORE, STORE + STORE.replace("%put =", "%put.2 =").replace("%t =", "%t.2 =")),),
        (("fusion-done(%put)", "fusion-done(%go.1)"),),
    ],
    ids=[
        "reads what is being overwritten",
        "ends behind an overwrite",
        "fetches twice",
        "fetches another one",
        "stores twice",
        "takes a fetch for a store",
    ],
)
def test_mutants_of_copies_in_loops_are_killed(edits: tuple[Edit, ...]) -> None:
    with pytest.raises(NotThePlainModuleError):
        judge(read_module(PLAIN_STREAM), read_module(edited(EARLY_STREAM, edits)))


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_killed(name: str) -> None:
    with pytest.raises(NotThePlainModuleError):
        judge(read_module(PLAIN), read_module(edited(PLANNED, MUTANTS[name])))


@pytest.mark.parametrize("name", LOOP_MUTANTS)
def test_mutants_of_loops_are_killed(name: str) -> None:
    with pytest.raises(NotThePlainModuleError):
        judge(read_module(PLAIN_LOOP), read_module(edited(PLANNED_LOOP, LOOP_MUTANTS[name])))


def edited(text: str, edits: tuple[Edit, ...]) -> str:
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    return text
