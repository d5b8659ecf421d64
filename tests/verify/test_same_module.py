"""The judge accepts clones, copies and another order, and kills every mutant that computes or reads otherwise."""

from __future__ import annotations

import pytest

from memplan.verify.same_module import NotThePlainModuleError, judge
from memplan.xla.module import read_module

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
        ("fusion(%b.run2, %put)", "fusion(%b.run3, %put)"),
        (CLONE, CLONE + "  %c.run2 = f32[8]{0} fusion(%c, %c), kind=kLoop, calls=%sub.0\n"),
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
    "a clone of another kind": ((CLONE, CLONE.replace("kLoop", "kInput")),),
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
    "another argument": (("%x = f32[8]{0} parameter(1)", "%x = f32[8]{0} parameter(3)"),),
    "another output": (("%loop.1, %after)", "%loop.1, %put)"),),
    "outputs in another order": (("%loop.1, %after)", "%after, %loop.1)"),),
    "another element of a tuple": (("(%loop), index=1", "(%loop), index=2"),),
    "another argument is donated": (("(0, {}, may-alias)", "(1, {}, may-alias)"),),
    "nothing is donated": ((", input_output_alias={ {0}: (0, {}, may-alias) }", ""),),
}  # fmt: skip


def test_the_plain_module_is_itself() -> None:
    judge(read_module(PLAIN), read_module(PLAIN))


def test_clones_copies_and_another_order_are_the_plain_module() -> None:
    judge(read_module(PLAIN), read_module(PLANNED))


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_killed(name: str) -> None:
    text = PLANNED
    for old, new in MUTANTS[name]:
        assert old in text, old
        text = text.replace(old, new)
    with pytest.raises(NotThePlainModuleError):
        judge(read_module(PLAIN), read_module(text))
