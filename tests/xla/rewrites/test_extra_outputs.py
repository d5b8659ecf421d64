"""Values that a late fusion makes beside its own results: cheaper where it reads the same, and gone in between."""

from __future__ import annotations

import pytest

from memplan.hardware.backend import GPU
from memplan.planning.packing import live_nbytes
from memplan.planning.problem import Problem
from memplan.verify.same_module import judge
from memplan.xla.buffers import problem_of
from memplan.xla.module import Module
from memplan.xla.rewrites.extra_outputs import add_outputs, output_costs
from memplan.xla.rewrites.merge import merge_fusions
from tests.goldens.steps import STEPS
from tests.hlo import read_module
from tests.xla.rewrites.compiled import compile_rewritten
from tests.xla.rewrites.test_merge import (
    ARRAY,
    DONATED,
    ENTRY,
    FUSED,
    MASKED,
    NBYTES,
    ROOMY,
    changed,
    fusions,
    library,
    lines,
    returned,
)

MID, GRAD = (
    library("mid", "early"),
    f"  %grad = {ARRAY} fusion(%x, %mid), kind=kLoop, calls=%bent.0\n",
)
LATE = f'  %late = {ARRAY} custom-call(%masked, %grad), custom_call_target="late"\n'
TEXT = FUSED + ENTRY + MASKED + library("early", "masked") + MID + GRAD + LATE + returned("late")


def priced(text: str, *crowded: int) -> dict[str, float]:
    """Where so many of the kernels run in a room that is full, by their numbers; all for none."""
    module = read_module(text)
    problem = problem_of(module, backend=GPU)
    many = range(len(problem.kernels))
    return dict(
        output_costs(module, problem, ROOMY, [ROOMY + (n in (crowded or many)) for n in many])
    )


def made(text: str, *names: str, room_nbytes: int = ROOMY) -> Module:
    """With extra outputs, judged."""
    plain = read_module(text)
    module = add_outputs(plain, names, room_nbytes)
    judge(plain, module)
    return module


def live(module: Module) -> list[int]:
    return live_nbytes(problem_of(module, backend=GPU)).tolist()


def test_a_late_reader_has_a_value_from_a_fusion_that_reads_the_same() -> None:
    module = made(TEXT, "masked")
    assert lines(module) == [
        MASKED.strip(),
        library("early", "masked").strip(),
        MID.strip(),
        f"%masked.again1.all1 = ({ARRAY}, {ARRAY}) fusion(%x, %mid, %y), kind=kLoop, calls=%masked.0.again1.all1",
        f"%grad.all1 = {ARRAY} get-tuple-element(%masked.again1.all1), index=0",
        f"%masked.again1.all2 = {ARRAY} get-tuple-element(%masked.again1.all1), index=1",
        f'%late = {ARRAY} custom-call(%masked.again1.all2, %grad.all1), custom_call_target="late"',
        f"ROOT %out = ({ARRAY}) tuple(%late)",
    ]


def test_it_is_not_there_in_between() -> None:
    before, after = live(read_module(TEXT)), live(made(TEXT, "masked"))
    assert len(before) == len(after) == 5
    assert before[2] - after[2] == NBYTES
    assert sum(after) < sum(before)


def test_views_of_it_are_views_of_what_is_add_outputs() -> None:
    flat = f"  %flat = f32[524288]{{0}} bitcast(%masked)\n{LATE.replace('%masked', '%flat')}"
    module = made(changed(TEXT, (LATE, flat)), "masked")
    assert module.entry.ops["late"].operands == ("flat.again1", "grad.all1")
    assert module.entry.ops["flat.again1"].operands == ("masked.again1.all2",)


def test_the_price_is_what_it_writes_and_reads_alone() -> None:
    # writes one array, reads one of two alone
    assert priced(TEXT) == {"masked": pytest.approx(2 / 3)}
    assert priced(changed(TEXT, ("fusion(%x, %mid)", "fusion(%y, %x)"))) == {
        "masked": pytest.approx(1 / 3)
    }


@pytest.mark.parametrize(
    ("crowded", "has"), [(0, False), (1, True), (2, True), (3, True), (4, False)]
)
def test_only_what_is_there_while_the_room_is_crowded_has_a_price(crowded: int, has: bool) -> None:
    assert (set(priced(TEXT, crowded)) == {"masked"}) == has


@pytest.mark.parametrize(
    "changes",
    [
        [("fusion(%x, %mid)", "fusion(%z, %mid)")],
        [(GRAD, GRAD.replace("kLoop", "kCustom"))],
        [(MASKED, MASKED.replace("kLoop", "kCustom"))],
        [(MASKED, library("masked", "x"))],
        [("select(%j, %g, %i)", "transpose(%g), dimensions={0,1}")],
        [(returned("late"), returned("late", "masked"))],
        [(LATE, f"  %held = ({ARRAY}) tuple(%masked)\n{LATE}")],
        [("custom-call(%masked, %grad)", "custom-call(%mid, %grad)")],  # nobody reads it late
    ],
)
def test_what_nobody_makes_beside_its_own_has_no_price(changes: list[tuple[str, str]]) -> None:
    assert priced(changed(TEXT, *changes)) == {}
    if "masked" in read_module(changed(TEXT, *changes)).entry.ops:
        made(changed(TEXT, *changes), "masked")


def test_little_values_and_little_rooms_have_no_price() -> None:
    assert priced(TEXT.replace("1024,512", "511,512")) == {}
    module = read_module(TEXT)
    assert output_costs(module, problem_of(module, backend=GPU), 6 * NBYTES, [ROOMY] * 5) == {}
    assert "masked.again1" in fusions(made(TEXT, "masked", room_nbytes=6 * NBYTES))


def test_names_of_nothing_change_nothing() -> None:
    module = read_module(TEXT)
    assert (
        add_outputs(module, [], ROOMY)
        is add_outputs(module, ["what", "masked{0}"], ROOMY)
        is module
    )


TWO = f"({ARRAY}, {ARRAY})"
LEAVES = f"""  %both = {TWO} fusion(%x, %y), kind=kLoop, calls=%bent.0
  %b.0 = {ARRAY} get-tuple-element(%both), index=0
  %b.1 = {ARRAY} get-tuple-element(%both), index=1
"""
BENT_AGAIN = FUSED[FUSED.index("%bent.0") - 1 :].replace("%bent.0", "%bent.1")
WITH_BOTH = f"%u = {ARRAY} tanh(%t)\n  ROOT %v = {TWO} tuple(%u, %t)"
OF_TWO = changed(FUSED, (f"ROOT %u = {ARRAY} tanh(%t)", WITH_BOTH)) + BENT_AGAIN
LATE_TWO = f'  %late = {ARRAY} custom-call(%grad, %b.0, %b.1), custom_call_target="late"\n'
GRAD_TWO = GRAD.replace("%bent.0", "%bent.1")


def test_one_fusion_makes_two_values() -> None:
    early = library("early", "b.0") + MID
    text = OF_TWO + ENTRY + LEAVES + early + GRAD_TWO + LATE_TWO + returned("late")
    module = made(text, "both{0}", "both{1}")
    assert list(fusions(module).values()) == [("x", "y"), ("x", "mid", "y")]
    assert module.entry.ops["late"].operands == (
        "grad.all1",
        "both.again1.all1",
        "both.again2.all2",
    )
    # each by itself
    assert priced(text) == {"both{0}": pytest.approx(2 / 3), "both{1}": pytest.approx(2 / 3)}


NEAR = f"  %near = {ARRAY} fusion(%y, %z), kind=kLoop, calls=%bent.1\n"
ALONE = (
    FUSED
    + BENT_AGAIN
    + ENTRY
    + MASKED
    + library("early", "masked")
    + NEAR
    + MID
    + GRAD.replace("%x", "%mid")
)


def test_clones_beside_each_other_alone_have_no_price() -> None:
    early = library("early", "b.0") + MID + GRAD_TWO.replace("%x", "%z")
    assert priced(OF_TWO + ENTRY + LEAVES + early + LATE_TWO + returned("late")) == {}


def test_nothing_makes_its_own_value_beside_it() -> None:
    module = made(
        ALONE + LATE.replace("%grad", "%grad, %near") + returned("late"), "masked", "near"
    )
    assert "near" in fusions(module)


def test_what_is_made_of_an_argument_that_is_overwritten_is_kept() -> None:
    new = (MID, MID + library("new", "mid")), ("fusion(%x, %mid)", "fusion(%y, %mid)")
    text = changed(TEXT, DONATED, *new, (returned("late"), returned("new", "late")))
    assert priced(text) == {}


@pytest.mark.gpu_aot
def test_the_compiler_takes_extra_outputs_as_they_are() -> None:
    def rewrite(module: Module, problem: Problem) -> Module:
        room_nbytes = int(0.9 * max(live_nbytes(problem)))
        result = merge_fusions(module, problem, room_nbytes).module
        problem = problem_of(result, backend=GPU)
        names = output_costs(result, problem, room_nbytes, live_nbytes(problem).tolist())
        kept = live(result)
        result = add_outputs(result, [name for name in names if "maximum" in name], room_nbytes)
        assert sum(live(result)) < sum(kept)
        return result

    step = STEPS["conv-net"]
    _, _, module = compile_rewritten(
        step.function, step.arguments, "memplan_test_handed_gpu", "v100", rewrite
    )
    assert sum(".all" in name for name in fusions(module)) > 1
