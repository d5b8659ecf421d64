"""The judge looks into branches and called computations as it looks into bodies of loops, and kills every mutant."""

from __future__ import annotations

import pytest

from memplan.verify.dataflow import NotThePlainModuleError
from memplan.verify.same_module import judge
from tests.hlo import read_module
from tests.verify.test_same_module import BODIES, SPACE, Edit, edited

PAIR = "(f32[8]{0}, f32[8]{0})"
PARAMETERS = f"""\
  %p = {PAIR} parameter(0)
  %a = f32[8]{{0}} get-tuple-element(%p), index=0
  %b = f32[8]{{0}} get-tuple-element(%p), index=1
"""
KEPT = "  %g = f32[8]{0} fusion(%a), kind=kLoop, calls=%tanh.0\n"
MADE = "  %h = f32[8]{0} fusion(%b), kind=kLoop, calls=%sine.0\n"
SAYS = '  %loud = f32[8]{0} custom-call(%h), custom_call_target="say", custom_call_has_side_effect=true\n'
DIFFERENCE = "  %d = f32[8]{0} fusion(%loud, %g), kind=kLoop, calls=%sub.0\n"
LAST = "  %z = f32[8]{0} fusion(%d, %h), kind=kLoop, calls=%sub.0\n"
CLOSING = f"  ROOT %q = {PAIR} tuple(%z, %d)\n}}\n"
AGAIN = "  %h.run2 = f32[8]{0} fusion(%b), kind=kLoop, calls=%sine.0.run2\n"
SINE = "  ROOT %q = f32[8]{0} sine(%p)\n}\n\n%one"
CLONE = "%sine.0.run2 (p: f32[8]) -> f32[8] {\n  %p = f32[8]{0} parameter(0)\n  ROOT %q = f32[8]{0} sine(%p)\n}\n"
SEND = f"  %send = ({SPACE}, f32[8]{{0}}, u32[]) copy-start(%g)\n"
SENT = f"  %sent = {SPACE} copy-done(%send)\n"
FETCH = f"  %fetch = (f32[8]{{0}}, {SPACE}, u32[]) copy-start(%sent)\n"
FETCHED = "  %back = f32[8]{0} copy-done(%fetch)\n"
PLAIN_BODY = f"{PARAMETERS}{KEPT}{MADE}{SAYS}{DIFFERENCE}{LAST}{CLOSING}"
PLANNED_BODY = (
    f"{PARAMETERS}{MADE}{KEPT}{SEND}{SAYS}{SENT}{FETCH}{FETCHED}"
    f"{DIFFERENCE.replace('%g)', '%back)')}{AGAIN}{LAST.replace('%h)', '%h.run2)')}{CLOSING}"
)
OTHER = f"{PARAMETERS}{MADE}{LAST.replace('%d,', '%a,')}  ROOT %q = {PAIR} tuple(%z, %h)\n}}\n"
ARGUMENTS = """\
  %x = f32[8]{0} parameter(0)
  %y = f32[8]{0} parameter(1)
  %number = s32[] parameter(2)
"""
CHOOSES = f"""\
  %first = {PAIR} tuple(%x, %y)
  %second = {PAIR} tuple(%y, %x)
  %chosen = {PAIR} conditional(%number, %first, %second), branch_computations={{%one.0, %other.0}}
"""
CALLS = f"  %first = {PAIR} tuple(%x, %y)\n  %chosen = {PAIR} call(%first), to_apply=%one.0\n"


def module(within: str, around: str, second: str = OTHER) -> str:
    """`within` chosen or called by `around`."""
    signature = "(p: (f32[8], f32[8])) -> (f32[8], f32[8]) {\n"
    return (
        f"HloModule jit_step, is_scheduled=true\n{BODIES}\n{CLONE}\n%one.0 {signature}{within}\n"
        f"%other.0 {signature}{second}\nENTRY %main (x: f32[8], y: f32[8], number: s32[]) -> f32[8] {{\n"
        f"{ARGUMENTS}{around}"
        "  %mine = f32[8]{0} get-tuple-element(%chosen), index=0\n"
        "  ROOT %out = f32[8]{0} fusion(%mine), kind=kLoop, calls=%tanh.0\n}\n"
    )


MUTANTS: dict[str, tuple[Edit, ...]] = {
    "a clone reads the other operand": ((AGAIN, AGAIN.replace("%b)", "%a)")),),
    "a clone with another body": ((SINE, SINE.replace("sine", "cosine")),),
    "a clone before its operand": ((AGAIN, ""), (PARAMETERS, AGAIN + PARAMETERS)),
    "a stale operand": (("fusion(%loud, %back)", "fusion(%loud, %h)"),),
    "swapped operands": (("fusion(%loud, %back)", "fusion(%back, %loud)"),),
    "another copy": (("copy-start(%g)", "copy-start(%h)"),),
    "a copy back from the wrong one": (("copy-start(%sent)", "copy-start(%h)"),),
    "a copy to the host that nobody waits for": ((SENT, ""), ("copy-start(%sent)", "copy-start(%send)")),
    "a copy back that nobody waits for": ((FETCHED, ""), ("fusion(%loud, %back)", "fusion(%loud, %fetch)")),
    "a copy that outlives its computation": ((FETCHED, FETCHED + FETCH.replace("%fetch =", "%late =")),),
    "a copy that is ended twice": ((FETCHED, FETCHED + FETCHED.replace("%back =", "%back.2 =")),),
    "it acts twice": ((SAYS, SAYS + SAYS.replace("%loud =", "%loud.2 =")),),
    "it does not act": ((SAYS, ""), ("fusion(%loud, %back)", "fusion(%h, %back)")),
    "other results": (("tuple(%z, %d)", "tuple(%d, %d)"),),
    "results in another order": (("tuple(%z, %d)", "tuple(%d, %z)"),),
    "another leaf of what it is given": (("%p), index=1\n", "%p), index=0\n"),),
}  # fmt: skip
OF_BRANCHES: dict[str, tuple[Edit, ...]] = {
    "the branches change places": (("{%one.0, %other.0}", "{%other.0, %one.0}"),),
    "their operands change places": (("(%number, %first, %second)", "(%number, %second, %first)"),),
    "the other branch computes otherwise": (("fusion(%a, %h)", "fusion(%h, %a)"),),
    "one of them runs whatever is chosen": (
        ("%chosen =", f"%both = {PAIR} call(%first), to_apply=%one.0\n  %chosen ="),
    ),
}  # fmt: skip


@pytest.mark.parametrize("around", [CHOOSES, CALLS], ids=["branch", "call"])
def test_clones_copies_and_another_order_are_the_plain_computation(around: str) -> None:
    judge(read_module(module(PLAIN_BODY, around)), read_module(module(PLAIN_BODY, around)))
    judge(read_module(module(PLAIN_BODY, around)), read_module(module(PLANNED_BODY, around)))


@pytest.mark.parametrize("around", [CHOOSES, CALLS], ids=["branch", "call"])
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_killed(name: str, around: str) -> None:
    with pytest.raises(NotThePlainModuleError):
        judge(
            read_module(module(PLAIN_BODY, around)),
            read_module(edited(module(PLANNED_BODY, around), MUTANTS[name])),
        )


@pytest.mark.parametrize("name", OF_BRANCHES)
def test_mutants_of_the_choice_are_killed(name: str) -> None:
    plain = module(PLAIN_BODY, CHOOSES)
    with pytest.raises(NotThePlainModuleError):
        judge(
            read_module(plain),
            read_module(edited(module(PLANNED_BODY, CHOOSES), OF_BRANCHES[name])),
        )
