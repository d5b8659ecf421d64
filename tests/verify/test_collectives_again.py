"""Collectives before the judge: gathers that run again as whole pairs, any order of pairs, and what it kills."""

from __future__ import annotations

import pytest

from memplan.verify.dataflow import NotThePlainModuleError
from memplan.verify.same_module import judge
from tests.hlo import read_module

HEAD = "HloModule jit_step, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }"
STATE = "(s32[], f32[8]{0}, f32[64]{0})"
GROUPS = "channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, use_global_device_ids=true"
SUMS = "to_apply=%add.0, output_to_operand_aliasing={{1}: (0, {})}"
BODY_GATHER = f"""  %h = ((f32[8]{{0}}), f32[64]{{0}}) all-gather-start(%k), {GROUPS}, dimensions={{0}}
  %hd = f32[64]{{0}} all-gather-done(%h)
"""
BODY_READ = "  %z = f32[64]{0} fusion(%y, %hd), kind=kLoop, calls=%sub.64\n"


def body(name: str, gather: str, read: str) -> str:
    return f"""
%{name} (p: (s32[], f32[8], f32[64])) -> (s32[], f32[8], f32[64]) {{
  %p = {STATE} parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %k = f32[8]{{0}} get-tuple-element(%p), index=1
  %v = f32[64]{{0}} get-tuple-element(%p), index=2
{gather}  %y = f32[64]{{0}} fusion(%v{", %hd" if gather else ", %v"}), kind=kLoop, calls=%sub.64
{read}  %one = s32[] constant(1)
  %j = s32[] add(%i, %one)
  ROOT %q = {STATE} tuple(%j, %k, %z)
}}
"""


BODIES = (
    f"""
%add.0 (s: f32[], t: f32[]) -> f32[] {{
  %s = f32[] parameter(0)
  %t = f32[] parameter(1)
  ROOT %u = f32[] add(%s, %t)
}}

%sub.64 (p: f32[64], r: f32[64]) -> f32[64] {{
  %p = f32[64]{{0}} parameter(0)
  %r = f32[64]{{0}} parameter(1)
  ROOT %q = f32[64]{{0}} subtract(%p, %r)
}}

%sub.8 (p: f32[8], r: f32[8]) -> f32[8] {{
  %p = f32[8]{{0}} parameter(0)
  %r = f32[8]{{0}} parameter(1)
  ROOT %q = f32[8]{{0}} subtract(%p, %r)
}}

%more.0 (p: (s32[], f32[8], f32[64])) -> pred[] {{
  %p = {STATE} parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] constant(3)
  ROOT %q = pred[] compare(%i, %n), direction=LT
}}
"""
    + body("first.0", BODY_GATHER, BODY_READ)
    + body("second.0", "", BODY_READ.replace("%hd", "%v"))
)
GATHER = f"""  %g = ((f32[8]{{0}}), f32[64]{{0}}) all-gather-start(%w), {GROUPS}, dimensions={{0}}
  %gd = f32[64]{{0}} all-gather-done(%g)
"""
AGAIN = GATHER.replace("%g ", "%g.run2 ").replace("%gd ", "%gd.run2 ").replace("(%g)", "(%g.run2)")
START, DONE = AGAIN.splitlines(keepends=True)
MADE = "  %b = f32[64]{0} fusion(%a, %x), kind=kLoop, calls=%sub.64\n"
READ = "  %c = f32[64]{0} fusion(%b, %gd), kind=kLoop, calls=%sub.64\n"
SUM = f"""  %r = ((f32[64]{{0}}), f32[64]{{0}}) all-reduce-start(%c), {GROUPS}, {SUMS}
"""
SUMMED = "  %rd = f32[64]{0} all-reduce-done(%r)\n"
SCATTER = f"""  %s = ((f32[64]{{0}}), f32[8]{{0}}) reduce-scatter-start(%b), {GROUPS}, dimensions={{0}}, to_apply=%add.0
"""
SCATTERED = "  %sd = f32[8]{0} reduce-scatter-done(%s)\n"
UPDATED = "  %new = f32[8]{0} fusion(%w, %sd), kind=kLoop, calls=%sub.8\n"
SAYS = "".join(
    f'  %said.{number} = f32[64]{{0}} custom-call(%x), custom_call_target="{word}", '
    "custom_call_has_side_effect=true\n" for number, word in enumerate(("say", "shout"))
)  # fmt: skip
LOOPS = f"""  %zero = s32[] constant(0)
  %state = {STATE} tuple(%zero, %u, %x)
  %loop = {STATE} while(%state), condition=%more.0, body=%first.0
  %loop.2 = f32[64]{{0}} get-tuple-element(%loop), index=2
  %state.1 = {STATE} tuple(%zero, %u, %loop.2)
  %loop.1 = {STATE} while(%state.1), condition=%more.0, body=%second.0
  %last = f32[64]{{0}} get-tuple-element(%loop.1), index=2
"""


def module(*entry: str, bodies: str = BODIES) -> str:
    return f"""{HEAD}
{bodies}
ENTRY %main (w: f32[8], x: f32[64], u: f32[8]) -> (f32[8], f32[64], f32[64]) {{
  %w = f32[8]{{0}} parameter(0)
  %x = f32[64]{{0}} parameter(1)
  %u = f32[8]{{0}} parameter(2)
{"".join(entry)}  ROOT %out = (f32[8]{{0}}, f32[64]{{0}}, f32[64]{{0}}) tuple(%new, %rd, %last)
}}
"""


A = "  %a = f32[64]{0} fusion(%gd, %x), kind=kLoop, calls=%sub.64\n"
READ_AGAIN = READ.replace("%gd", "%gd.run2")
BEGUN = (GATHER, SAYS, A, MADE)
ENDED = (SUM, SCATTER, SUMMED, SCATTERED, UPDATED, LOOPS)
PLAIN = module(*BEGUN, READ, *ENDED)
BODY_AGAIN = (
    BODY_GATHER.replace("%h ", "%h.run2 ").replace("%hd ", "%hd.run2 ").replace("(%h)", "(%h.run2)")
)
SOUND = {
    "itself": PLAIN,
    "a gather again, as a whole pair": module(*BEGUN, AGAIN, READ_AGAIN, *ENDED),
    "kernels beside a gather that runs again": module(
        GATHER, SAYS, A, START, MADE, DONE, READ_AGAIN, *ENDED
    ),
    "other collectives first": module(
        *BEGUN, SCATTER, READ, SUM, SCATTERED, SUMMED, LOOPS, UPDATED
    ),
    "a body gathers again": module(
        *BEGUN,
        READ,
        *ENDED,
        bodies=BODIES.replace(BODY_READ, BODY_AGAIN + BODY_READ.replace("%hd", "%hd.run2")),
    ),
}
SECOND_READ = BODY_READ.replace("%hd", "%v")
MUTANTS = {
    "a pair that is begun again and never ends": module(*BEGUN, START, READ, *ENDED),
    "a pair that is ended again": module(*BEGUN, DONE.replace("(%g.run2)", "(%g)"), READ, *ENDED),
    "two ends of one start": module(*BEGUN, AGAIN, DONE.replace("%gd.run2 =", "%gd.run3 ="), READ, *ENDED),
    "an incomplete gather is read": module(
        *BEGUN,
        START,
        "  %gd.run2 = f32[64]{0} get-tuple-element(%g.run2), index=1\n",
        READ_AGAIN,
        DONE.replace("%gd.run2 =", "%gd.run3 ="),
        *ENDED,
    ),
    "other groups": module(*BEGUN, AGAIN.replace("{{0,1,2,3,4,5,6,7}}", "{{0,1,2,3},{4,5,6,7}}"), READ_AGAIN, *ENDED),
    "another shard": module(*BEGUN, AGAIN.replace("start(%w)", "start(%u)"), READ_AGAIN, *ENDED),
    "a shard that was overwritten": module(
        *BEGUN, READ, SUM, SCATTER, SUMMED, SCATTERED, UPDATED, AGAIN, LOOPS
    ),
    "a shard that is overwritten before the end": module(
        *BEGUN, READ, SUM, SCATTER, SUMMED, SCATTERED, START, UPDATED, DONE, LOOPS
    ),
    "a sum again": module(
        *BEGUN, READ, SUM, SUMMED, SUM.replace("%r ", "%r.run2 "), SUMMED.replace("%rd ", "%rd.run2 ").replace(
            "(%r)", "(%r.run2)"), *ENDED[1:2], *ENDED[3:]
    ),
    "a scatter again": module(
        *BEGUN, READ, *ENDED[:2], SCATTER.replace("%s ", "%s.run2 "), SCATTERED.replace("%sd ", "%sd.run2 ").replace(
            "(%s)", "(%s.run2)"), *ENDED[2:]
    ),
    "a sum is left out": module(*BEGUN, READ, *ENDED).replace(SUM, "").replace(SUMMED, "").replace("%rd", "%c"),
    "a body gathers what another does": module(
        *BEGUN,
        READ,
        *ENDED,
        bodies=BODIES.replace(SECOND_READ, BODY_GATHER.replace("%h", "%more") + SECOND_READ),
    ),
    "the entry gathers what a body does": module(*BEGUN, READ, AGAIN.replace("(%w)", "(%u)"), *ENDED),
    "what acts changes its order": module(
        GATHER, "".join(reversed(SAYS.splitlines(keepends=True))), A, MADE, READ, *ENDED
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SOUND)
def test_sound_modules_are_accepted(name: str) -> None:
    judge(read_module(PLAIN), read_module(SOUND[name]))


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_killed(name: str) -> None:
    assert MUTANTS[name] != PLAIN
    with pytest.raises(NotThePlainModuleError):
        judge(read_module(PLAIN), read_module(MUTANTS[name]))


def test_what_is_summed_in_place_is_read_before() -> None:
    """The scatter ends before the sum that overwrites what it reads begins."""
    scatter = SCATTER.replace("(%b)", "(%c)")
    plain = module(*BEGUN, READ, scatter, SCATTERED, SUM, SUMMED, UPDATED, LOOPS)
    for mutant in (
        module(*BEGUN, READ, SUM, scatter, SCATTERED, SUMMED, UPDATED, LOOPS),
        module(*BEGUN, READ, scatter, SUM, SCATTERED, SUMMED, UPDATED, LOOPS),
    ):
        with pytest.raises(NotThePlainModuleError, match="what was overwritten before"):
            judge(read_module(plain), read_module(mutant))
