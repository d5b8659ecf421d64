"""The judge of shaped collectives accepts every equivalent composition, and kills every mutant of one."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from memplan.verify.dataflow import NotThePlainModuleError
from memplan.verify.same_collectives import judge_shaped
from tests.hlo import read_module
from tests.verify.collective_texts import (
    ACROSS,
    ALL,
    INSIDE,
    Case,
    Lines,
    Phases,
    along,
    brackets,
    bucket,
    exchanging,
    flat_scatter,
    in_phases,
    loop,
    module,
    one_by_one,
    plain_gather,
    plain_scatter,
    plain_sums,
    rounding,
    scattering,
    shaped_gather,
    shaped_scatter,
    shaped_sums,
    summed,
    tuple_sums,
    unchanged,
    with_layouts,
)


def check(case: Case) -> None:
    plain, shaped = (read_module(text, scheduled=False) for text in (case.plain, case.shaped))
    judge_shaped(plain, shaped, case.partitions, case.wire)


def swap(text: str, old: str, new: str) -> str:
    """The text with another part; the part must be there."""
    assert old in text and old != new
    return text.replace(old, new)


def without(text: str, name: str) -> str:
    """The text without an instruction."""
    remainder = re.sub(rf"^ +%{re.escape(name)} = .*\n", "", text, flags=re.MULTILINE)
    assert remainder != text
    return remainder


IN_BUCKET = Case(plain_sums(ALL), shaped_sums(scattering(INSIDE, ACROSS)))
THREE = [along((2, 2, 2), level) for level in (2, 1, 0)]
TWELVE = [along((3, 4), level) for level in (1, 0)]
ROUNDED = Case(plain_sums(ALL), shaped_sums(rounding(INSIDE, ACROSS), 8), wire="bfloat16")
BY_TUPLES = Case(
    plain_sums(ALL), shaped_sums(rounding(INSIDE, ACROSS, tuples=True), 8), wire="bfloat16"
)
EXCHANGED = Case(plain_sums(ALL), shaped_sums(exchanging(INSIDE, ACROSS)))
GATHERED = Case(plain_gather((3, 4, 5), 1, ALL), shaped_gather((3, 4, 5), 1, [ACROSS, INSIDE]))
SCATTERED = Case(plain_scatter((16, 24), 1, ALL), shaped_scatter((16, 24), 1, INSIDE, ACROSS))
IN_LOOP = loop(summed("t"), unchanged("total"))
MOVED = Case(IN_LOOP, loop(unchanged("t"), summed("total")))
PHASES = scattering(INSIDE, ACROSS)
CUBE = (3, 4, 5)

# Hosts that hold every other device, the devices of a host in another order.
ODD = [[6, 2, 0, 4], [7, 3, 1, 5]]
ODD_ACROSS = [[6, 7], [2, 3], [0, 1], [4, 5]]
# Parts of an axis: {0, 1, 4, 5} and {2, 3, 6, 7}.
PART, PART_INSIDE, PART_ACROSS = along((2, 2, 2), 0, 2), along((2, 2, 2), 2), along((2, 2, 2), 0)


def transposed_member() -> Case:
    """Members that are transposed, in pieces smaller than their rows."""
    texts = []
    for do in (None, scattering(*TWELVE)):
        lines = Lines()
        lines.put("x", "f32[5,2,3]", "parameter(0)")
        lines.put("y", "f32[7]", "parameter(1)")
        lines.put("t", "f32[3,5,2]", "transpose(%x), dimensions={2,0,1}")
        if do is None:
            lines.send("s", "f32[3,5,2]", "all-reduce", "%t", along((3, 4), 0, 1))
            lines.send("u", "f32[7]", "all-reduce", "%y", along((3, 4), 0, 1))
        else:
            bucket(lines, "k", [("t", "s", (3, 5, 2)), ("y", "u", (7,))], 4, do)
        lines.put("out", "(f32[3,5,2], f32[7])", "tuple(%s, %u)")
        texts.append(module(lines))
    return Case(*texts, partitions=12)


def in_both_loops() -> Case:
    """A loop in a loop, the inner one's sum moved out of both."""

    def nested(inside: Callable[[Lines], str], behind: Callable[[Lines], str]) -> str:
        inner = loop(inside, unchanged("total"))
        for name in ("body", "until"):
            inner = inner.replace(f"%{name}", f"%inner.{name}")
        bodies = "\n\n".join(re.findall(r"^%inner\.\w+ .*?^}", inner, re.MULTILINE | re.DOTALL))

        def term(lines: Lines) -> str:
            lines.put("nil", "s32[]", "constant(0)")
            lines.put("zero", "f32[]", "constant(0)")
            lines.put("zeros", "f32[6,8]", "broadcast(%zero), dimensions={}")
            carry = "(s32[], f32[6,8], f32[6,8])"
            lines.put("start", carry, "tuple(%nil, %zeros, %t)")
            lines.put("loop", carry, "while(%start), condition=%inner.until, body=%inner.body")
            return lines.put("total", "f32[6,8]", "get-tuple-element(%loop), index=1")

        return loop(term, behind).replace("\n%body", f"\n{bodies}\n\n%body")

    return Case(nested(summed("t"), unchanged("total")), nested(unchanged("t"), summed("total")))


def gather_in_a_loop() -> Case:
    """The body of a loop gathers a piece of its parameter, in one phase or two."""

    def read(phases: bool) -> Callable[[Lines], str]:
        def write(lines: Lines) -> str:
            lines.put("p", "f32[6,1]", "slice(%t), slice={[0:6], [2:3]}")
            if not phases:
                return lines.send("w", "f32[6,8]", "all-gather", "%p", ALL, ", dimensions={1}")
            lines.put("p.one", "f32[1,6,1]", "reshape(%p)")
            lines.send("p.far", "f32[2,6,1]", "all-gather", "%p.one", ACROSS, ", dimensions={0}")
            lines.put("p.host", "f32[1,2,6,1]", "reshape(%p.far)")
            lines.send(
                "p.near", "f32[4,2,6,1]", "all-gather", "%p.host", INSIDE, ", dimensions={0}"
            )
            lines.put("p.turned", "f32[6,2,4,1]", "transpose(%p.near), dimensions={2,1,0,3}")
            return lines.put("w", "f32[6,8]", "reshape(%p.turned)")

        return write

    return Case(loop(read(False), unchanged("total")), loop(read(True), unchanged("total")))


def in_a_branch() -> Case:
    """A computation that is called sums in phases."""
    texts = []
    for do in (summed("g", dims=(6,)), in_phases("g", PHASES, (6,))):
        inner = Lines(71)
        inner.put("g", "f32[6]", "parameter(0)")
        do(inner)
        outer = Lines()
        outer.put("x", "f32[6]", "parameter(0)")
        outer.put("out", "f32[6]", "call(%x), to_apply=%inner")
        texts.append(module(outer, inner.computation("inner")))
    return Case(*texts)


def padded_by_concatenation() -> Case:
    """Zeros that are an array of their own."""
    shaped = swap(
        IN_BUCKET.shaped,
        "pad(%k0.cat, %k0.zero), padding=0_2",
        "concatenate(%k0.cat, %two), dimensions={0}",
    )
    two = "%two = f32[2] broadcast(%k0.zero), dimensions={}\n  %k0.pad ="
    return Case(IN_BUCKET.plain, swap(shaped, "%k0.pad =", two))


def three_levels_rounded() -> Case:
    inner, middle, outer = THREE

    def do(lines: Lines, operand: str, size: int) -> str:
        half = brackets([size // 2])
        piece = lines.send(
            f"{operand}.first", half, "reduce-scatter", f"%{operand}", inner, ", dimensions={0}"
        )
        piece = rounding(middle, outer)(lines, piece, size // 2)
        return lines.send(
            f"{operand}.last",
            brackets([size]),
            "all-gather",
            f"%{piece}",
            inner,
            ", dimensions={0}",
        )

    return Case(plain_sums(ALL), shaped_sums(do, 8), wire="bfloat16")


ACCEPTED: dict[str, Case] = {
    "unchanged": Case(IN_BUCKET.plain, IN_BUCKET.plain),
    "one bucket": IN_BUCKET,
    "two buckets": Case(plain_sums(ALL), shaped_sums(PHASES, 4, ((2, 0), (1,)))),
    "a bucket of one": Case(plain_sums(ALL), shaped_sums(PHASES, 4, ((0,), (1,), (2,)))),
    "three levels": Case(plain_sums(ALL), shaped_sums(scattering(*THREE))),
    "three hosts of four": Case(
        plain_sums(along((3, 4), 0, 1)), shaped_sums(scattering(*TWELVE)), 12
    ),
    "across hosts first": Case(plain_sums(ALL), shaped_sums(scattering(ACROSS, INSIDE))),
    "hosts of every other device": Case(plain_sums(ALL), shaped_sums(scattering(ODD, ODD_ACROSS))),
    "parts of an axis": Case(plain_sums(PART), shaped_sums(scattering(PART_INSIDE, PART_ACROSS))),
    "two all-reduces": Case(plain_sums(ALL), shaped_sums(one_by_one(INSIDE, ACROSS))),
    "three all-reduces": Case(plain_sums(ALL), shaped_sums(one_by_one(*THREE))),
    "an all-reduce of several": Case(tuple_sums(ALL), shaped_sums(PHASES)),
    "several as one": Case(plain_sums(ALL), tuple_sums(ALL)),
    "layouts": Case(with_layouts(plain_sums(ALL)), with_layouts(shaped_sums(PHASES))),
    "exchanged and added": EXCHANGED,
    "padded by concatenation": padded_by_concatenation(),
    "transposed member": transposed_member(),
    "rounded": ROUNDED,
    "rounded to float16": Case(
        plain_sums(ALL), shaped_sums(rounding(INSIDE, ACROSS, "f16"), 8), wire="float16"
    ),
    "rounded in tuples": BY_TUPLES,
    "rounded on three levels": three_levels_rounded(),
    "rounding allowed": Case(IN_BUCKET.plain, IN_BUCKET.shaped, wire="bfloat16"),
    **{
        f"gathered along {dim}": Case(
            plain_gather((3, 4, 5), dim, ALL), shaped_gather((3, 4, 5), dim, [ACROSS, INSIDE])
        )
        for dim in range(3)
    },
    "gathered on three levels": Case(
        plain_gather((3, 4), 1, ALL), shaped_gather((3, 4), 1, [THREE[2], THREE[1], THREE[0]])
    ),
    "gathered device by device": Case(
        plain_gather((3, 4), 1, [[0, 4, 1, 5, 2, 6, 3, 7]]),
        shaped_gather((3, 4), 1, [ACROSS, INSIDE], [1, 0]),
    ),
    "gathered on a part of an axis": Case(
        plain_gather((3, 4), 0, PART), shaped_gather((3, 4), 0, [PART_ACROSS, PART_INSIDE])
    ),
    "gathered in a loop": gather_in_a_loop(),
    **{
        f"scattered along {dim}": Case(
            plain_scatter((16, 24), dim, ALL), shaped_scatter((16, 24), dim, INSIDE, ACROSS)
        )
        for dim in range(2)
    },
    "flat scatter along 1": Case(
        flat_scatter((16, 24), 1, ALL), shaped_scatter((16, 24), 1, INSIDE, ACROSS)
    ),
    "scatter that XLA will make": Case(
        plain_scatter((16, 24), 0, ALL), flat_scatter((16, 24), 0, ALL)
    ),
    "scattered on a part of an axis": Case(
        plain_scatter((16, 24), 0, PART, (0, 1, 0, 1, 2, 3, 2, 3)),
        shaped_scatter((16, 24), 0, PART_INSIDE, PART_ACROSS),
    ),
    "moved out of a loop": MOVED,
    "moved out and in phases": Case(IN_LOOP, loop(unchanged("t"), in_phases("total", PHASES))),
    "moved out of two loops": in_both_loops(),
    "in phases in a loop": Case(IN_LOOP, loop(in_phases("t", PHASES), unchanged("total"))),
    "in a branch": in_a_branch(),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepts_an_equivalent_composition(name: str) -> None:
    check(ACCEPTED[name])


# rounding, offsets, and barriers go one way alone
_ONE_WAY = re.compile("rounded|rounding|^scatter|all-reduces$")


@pytest.mark.parametrize("name", [name for name in ACCEPTED if not _ONE_WAY.search(name)])
def test_accepts_the_way_back(name: str) -> None:
    """Neither module is special: what is equal is equal from the other side."""
    case = ACCEPTED[name]
    check(Case(case.shaped, case.plain, case.partitions))


@pytest.mark.parametrize("name", [name for name, case in ACCEPTED.items() if case.wire is not None])
def test_refuses_what_is_rounded_unless_asked(name: str) -> None:
    case = ACCEPTED[name]
    if name != "rounding allowed":
        with pytest.raises(NotThePlainModuleError):
            check(Case(case.plain, case.shaped, case.partitions))


MUTANTS: list[Callable[[], Case]] = []


def mutant(make: Callable[[], Case]) -> Callable[[], Case]:
    MUTANTS.append(make)
    return make


def of(case: Case, old: str, new: str) -> Case:
    return Case(case.plain, swap(case.shaped, old, new), case.partitions, case.wire)


def with_phases(do: Phases, multiple: int = 4) -> Case:
    return Case(plain_sums(ALL), shaped_sums(do, multiple))


@mutant
def sums_in_the_wrong_groups() -> Case:
    return with_phases(scattering(INSIDE, [[0, 5], [1, 4], [2, 6], [3, 7]]))


@mutant
def sums_in_groups_that_overlap() -> Case:
    return with_phases(scattering(INSIDE, [[0, 4], [0, 5], [2, 6], [3, 7]]))


@mutant
def sums_inside_hosts_alone() -> Case:
    return with_phases(one_by_one(INSIDE))


@mutant
def sums_inside_hosts_twice() -> Case:
    return with_phases(one_by_one(INSIDE, INSIDE, ACROSS))


@mutant
def sums_all_after_the_hosts() -> Case:
    return with_phases(one_by_one(INSIDE, ALL))


@mutant
def leaves_devices_out() -> Case:
    return with_phases(one_by_one(INSIDE, [[0, 4], [1, 5], [2, 6]]))


@mutant
def gathers_pieces_across_hosts() -> Case:
    """Across hosts first, the pieces put together as if inside had come first."""
    groups = "{{0,4},{1,5},{2,6},{3,7}}, use_global_device_ids=true, dimensions={0}"
    wrong_groups = "{{0,1},{2,3},{4,5},{6,7}}, use_global_device_ids=true, dimensions={0}"
    case = Case(plain_sums(ALL), shaped_sums(scattering(ACROSS, INSIDE)))
    return Case(case.plain, wrong_groups.join(case.shaped.rsplit(groups, 1)))


@mutant
def gathers_in_another_order() -> Case:
    gathered = "all-gather(%k0.pad.d0.m), channel_id=13, replica_groups={{0,1,2,3}"
    return of(IN_BUCKET, gathered, swap(gathered, "0,1,2,3", "1,0,2,3"))


@mutant
def scatters_in_another_order() -> Case:
    sent = "reduce-scatter(%k0.pad), channel_id=11, replica_groups={{0,1,2,3}"
    return of(IN_BUCKET, sent, swap(sent, "0,1,2,3", "0,1,3,2"))


@mutant
def sums_pieces_of_other_places() -> Case:
    """Host 1 has its devices in another order, across hosts other pieces meet."""
    return with_phases(scattering([[0, 1, 2, 3], [5, 4, 6, 7]], ACROSS))


@mutant
def pads_with_ones() -> Case:
    """Nobody reads the padding, but what is no zero is an element that the plain module does not have."""
    return of(IN_BUCKET, "%k0.zero = f32[] constant(0)", "%k0.zero = f32[] constant(1)")


@mutant
def pads_in_front() -> Case:
    return of(IN_BUCKET, "padding=0_2", "padding=2_0")


@mutant
def pads_between() -> Case:
    return of(IN_BUCKET, "padding=0_2", "padding=0_2_1")


@mutant
def cuts_at_the_wrong_place() -> Case:
    return of(IN_BUCKET, "slice={[15:22]}", "slice={[14:21]}")


@mutant
def cuts_behind_the_end() -> Case:
    return of(IN_BUCKET, "slice={[22:46]}", "slice={[25:49]}")


@mutant
def cuts_every_other_element() -> Case:
    return of(IN_BUCKET, "slice={[22:46]}", "slice={[0:48:2]}")


@mutant
def swaps_members_of_a_bucket() -> Case:
    return of(
        IN_BUCKET,
        "concatenate(%sum0.flat, %sum1.flat, %sum2.flat)",
        "concatenate(%sum2.flat, %sum1.flat, %sum0.flat)",
    )


@mutant
def sums_a_member_twice() -> Case:
    again = Lines(99)
    again.send("again", "f32[7]", "all-reduce", "%sum1.cut", INSIDE)
    shaped = swap(IN_BUCKET.shaped, "reshape(%sum1.cut)", "reshape(%again)")
    return Case(IN_BUCKET.plain, swap(shaped, "  %sum1 =", f"{again.lines[0]}\n  %sum1 ="))


@mutant
def does_not_sum_a_member() -> Case:
    return of(IN_BUCKET, "reshape(%sum1.cut)", "reshape(%g1)")


@mutant
def sums_one_member_in_place_of_another() -> Case:
    return of(IN_BUCKET, "reshape(%g0)", "reshape(%x0)")


@mutant
def doubles_on_the_device() -> Case:
    shaped = swap(IN_BUCKET.shaped, "reshape(%sum1.cut)", "reshape(%double)")
    return Case(
        IN_BUCKET.plain,
        swap(shaped, "%sum1 =", "%double = f32[7] add(%sum1.cut, %sum1.cut)\n  %sum1 ="),
    )


@mutant
def takes_the_largest() -> Case:
    sent = "all-reduce(%k0.pad.d0), channel_id=12, replica_groups={{0,4},{1,5},{2,6},{3,7}}, use_global_device_ids=true"
    return of(IN_BUCKET, f"{sent}, to_apply=%add.f", f"{sent}, to_apply=%maximum.f")


@mutant
def multiplies() -> Case:
    return of(IN_BUCKET, "to_apply=%add.f", "to_apply=%multiply.f")


@mutant
def sums_where_the_plain_module_takes_the_largest() -> Case:
    return Case(swap(IN_BUCKET.plain, "to_apply=%add.f", "to_apply=%maximum.f"), IN_BUCKET.shaped)


@mutant
def adds_one_of_both_twice() -> Case:
    return of(IN_BUCKET, "add(%a.add, %b.add)", "add(%a.add, %a.add)")


@mutant
def uses_a_channel_twice() -> Case:
    return of(IN_BUCKET, "channel_id=12", "channel_id=11")


@mutant
def names_replicas() -> Case:
    """Without channels the numbers in groups are those of replicas, of which there is one."""
    groups = "replica_groups={{0,4},{1,5},{2,6},{3,7}}"
    return of(IN_BUCKET, f"channel_id=12, {groups}, use_global_device_ids=true", groups)


@mutant
def names_no_devices() -> Case:
    sent = "replica_groups={{0,4},{1,5},{2,6},{3,7}}"
    return of(IN_BUCKET, f"{sent}, use_global_device_ids=true", sent)


@mutant
def reshapes_columns() -> Case:
    """A reshape of an array whose columns lie one behind the other is none of its elements' order."""
    shaped = swap(IN_BUCKET.shaped, "%g0 = f32[3,5] ", "%g0 = f32[3,5]{0,1} ")
    return Case(swap(IN_BUCKET.plain, "%g0 = f32[3,5] ", "%g0 = f32[3,5]{0,1} "), shaped)


@mutant
def reads_another_operand() -> Case:
    return of(IN_BUCKET, "negate(%sum1)", "negate(%g1)")


@mutant
def computes_something_else() -> Case:
    return of(IN_BUCKET, "%g1 = f32[7] tanh", "%g1 = f32[7] sine")


@mutant
def computes_more() -> Case:
    return of(IN_BUCKET, "%r0 =", "%more = f32[7] cosine(%x1)\n  %r0 =")


@mutant
def computes_twice() -> Case:
    return of(IN_BUCKET, "%r0 =", "%more = f32[7] tanh(%x1)\n  %r0 =")


@mutant
def sends_what_nobody_reads() -> Case:
    more = "%more = f32[7] all-reduce(%g1), channel_id=77, replica_groups={{0,1,2,3,4,5,6,7}}"
    return of(IN_BUCKET, "%r0 =", f"{more}, use_global_device_ids=true, to_apply=%add.f\n  %r0 =")


@mutant
def swaps_results() -> Case:
    return of(IN_BUCKET, "tuple(%r0, %r1, %r2)", "tuple(%r2, %r1, %r0)")


@mutant
def gives_other_arguments_away() -> Case:
    return of(IN_BUCKET, "{}: (0, {}, may-alias)", "{}: (1, {}, may-alias)")


@mutant
def has_another_layout_of_results() -> Case:
    return of(
        IN_BUCKET, "entry_computation_layout={(f32[8]{0})", "entry_computation_layout={(f32[8]{1})"
    )


_CALL = '%call = f32[7] custom-call(%x1), custom_call_target="print", custom_call_has_side_effect=true\n  %r0 ='
_OTHER = swap(_CALL, "%call = f32[7] custom-call(%x1)", "%other = f32[15] custom-call(%g0)")


@mutant
def has_another_effect() -> Case:
    return of(IN_BUCKET, "%r0 =", _CALL)


@mutant
def loses_an_effect() -> Case:
    return Case(swap(IN_BUCKET.plain, "%r0 =", _CALL), IN_BUCKET.shaped)


@mutant
def repeats_an_effect() -> Case:
    twice = swap(_CALL, "%call", "%again")
    shaped = swap(swap(IN_BUCKET.shaped, "%r0 =", _CALL), "%r0 =", twice)
    return Case(swap(IN_BUCKET.plain, "%r0 =", _CALL), shaped)


@mutant
def swaps_effects() -> Case:
    plain = swap(swap(IN_BUCKET.plain, "%r0 =", _CALL), "%r0 =", _OTHER)
    shaped = swap(swap(IN_BUCKET.shaped, "%r0 =", _OTHER), "%r0 =", _CALL)
    return Case(plain, shaped)


@mutant
def swaps_random_numbers() -> Case:
    """Two generators of the same text make different numbers."""
    low, high = "%low = f32[] constant(1)", "%high = f32[] constant(2)"
    draw = "rng(%low, %high), distribution=rng_uniform"
    lines = f"{low}\n  {high}\n  %a = f32[7] {draw}\n  %b = f32[7] {draw}\n  %r0 ="
    plain = swap(swap(IN_BUCKET.plain, "%r0 =", lines), "negate(%sum1)", "subtract(%a, %b)")
    shaped = swap(swap(IN_BUCKET.shaped, "%r0 =", lines), "negate(%sum1)", "subtract(%b, %a)")
    return Case(plain, shaped)


@mutant
def loses_a_barrier() -> Case:
    kept = "%kept = f32[7] opt-barrier(%g1)\n  %r0 ="
    plain = swap(swap(IN_BUCKET.plain, "%r0 =", kept), "negate(%sum1)", "negate(%kept)")
    return Case(plain, swap(IN_BUCKET.shaped, "negate(%sum1)", "negate(%g1)"))


@mutant
def forgets_to_wait() -> Case:
    plain, shaped = (
        swap(
            text,
            "%r1 = f32[7] negate(%sum1)",
            "%r1 = f32[7] negate(%sum1), control-predecessors={%r0}",
        )
        for text in (IN_BUCKET.plain, IN_BUCKET.shaped)
    )
    return Case(plain, swap(shaped, ", control-predecessors={%r0}", ""))


@mutant
def waits_for_another() -> Case:
    plain, shaped = (
        swap(
            text,
            "%r1 = f32[7] negate(%sum1)",
            f"%r1 = f32[7] negate(%sum1), control-predecessors={{%{name}}}",
        )
        for text, name in ((IN_BUCKET.plain, "r0"), (IN_BUCKET.shaped, "g0"))
    )
    return Case(plain, shaped)


@mutant
def permutes_to_another_device() -> Case:
    sent = "%sum1.sent = f32[7] collective-permute(%g1), channel_id=88, source_target_pairs={{0,1}}\n  %r0 ="
    plain, shaped = (
        swap(swap(text, "%r0 =", sent), "negate(%sum1)", "negate(%sum1.sent)")
        for text in (IN_BUCKET.plain,) * 2
    )
    return Case(plain, swap(shaped, "{{0,1}}", "{{0,2}}"))


@mutant
def reads_before_it_is_made() -> Case:
    lines = IN_BUCKET.shaped.split("\n")
    first = next(line for line in lines if "%sum1.flat =" in line)
    last = next(line for line in lines if "%k0.cat =" in line)
    return Case(
        IN_BUCKET.plain, swap(swap(IN_BUCKET.shaped, f"{first}\n", ""), last, f"{last}\n{first}")
    )


@mutant
def rounds_unasked() -> Case:
    return Case(ROUNDED.plain, ROUNDED.shaped)


@mutant
def rounds_to_another_type() -> Case:
    return Case(ROUNDED.plain, ROUNDED.shaped, wire="float16")


@mutant
def rounds_inside_the_host_too() -> Case:
    """Two rounded sums, one behind the other."""

    def do(lines: Lines, operand: str, size: int) -> str:
        half = size // 2
        piece = lines.send(
            f"{operand}.e",
            brackets([half]),
            "reduce-scatter",
            f"%{operand}",
            THREE[0],
            ", dimensions={0}",
        )
        piece = rounding([[device] for device in range(8)], THREE[1])(lines, piece, half)
        piece = rounding([[device] for device in range(8)], THREE[2])(lines, piece, half)
        return lines.send(
            f"{operand}.f",
            brackets([size]),
            "all-gather",
            f"%{piece}",
            THREE[0],
            ", dimensions={0}",
        )

    return Case(plain_sums(ALL), shaped_sums(do, 8), wire="bfloat16")


@mutant
def rounds_before_the_sum_inside() -> Case:
    text = swap(ROUNDED.shaped, "reduce-scatter(%k0.pad)", "reduce-scatter(%rough)")
    lines = "%short = bf16[48] convert(%k0.pad)\n  %rough = f32[48] convert(%short)\n  %k0.pad.d ="
    return Case(ROUNDED.plain, swap(text, "%k0.pad.d =", lines), wire="bfloat16")


@mutant
def sums_in_bfloat16() -> Case:
    text = swap(
        ROUNDED.shaped,
        "%k0.pad.floats = f32[2,6] convert(%k0.pad.halves)",
        "%k0.pad.none = f32[] constant(0)",
    )
    text = swap(text, "%k0.pad.from = f32[] constant(0)", "%k0.pad.from = bf16[] constant(0)")
    text = swap(text, "f32[6] reduce(%k0.pad.floats", "bf16[6] reduce(%k0.pad.halves")
    text = swap(text, "bf16[6] convert(%k0.pad.sum)", "bf16[6] reshape(%k0.pad.sum)")
    return Case(ROUNDED.plain, text, wire="bfloat16")


@mutant
def returns_the_rounded_terms() -> Case:
    """The terms of one's own host alone, rounded."""
    text = swap(
        ROUNDED.shaped,
        "f32[6] reduce(%k0.pad.floats, %k0.pad.from), dimensions={0}, to_apply=%add.f",
        "f32[6] reshape(%k0.pad.one)",
    )
    term = "%k0.pad.one = f32[1,6] slice(%k0.pad.floats), slice={[0:1], [0:6]}\n  %k0.pad.sum ="
    return Case(ROUNDED.plain, swap(text, "%k0.pad.sum =", term), wire="bfloat16")


@mutant
def sums_rounded_terms_from_one() -> Case:
    return of(ROUNDED, "%k0.pad.from = f32[] constant(0)", "%k0.pad.from = f32[] constant(1)")


@mutant
def takes_the_largest_of_rounded_terms() -> Case:
    summed_up = "dimensions={0}, to_apply=%add.f\n  %k0.pad.again"
    return of(ROUNDED, summed_up, swap(summed_up, "add", "maximum"))


@mutant
def exchanges_parts_in_another_order() -> Case:
    sent = "all-to-all(%k0.pad.bits.s0, %k0.pad.bits.s1)"
    return of(BY_TUPLES, sent, "all-to-all(%k0.pad.bits.s1, %k0.pad.bits.s0)")


@mutant
def exchanges_in_another_order() -> Case:
    sent = "all-to-all(%k0.pad.bits), channel_id=12, replica_groups={{0,4}"
    return of(ROUNDED, sent, swap(sent, "{0,4}", "{4,0}"))


@mutant
def exchanges_inside_the_host() -> Case:
    sent = "all-to-all(%k0.pad.bits), channel_id=12, replica_groups={{0,4},{1,5},{2,6},{3,7}}"
    return of(ROUNDED, sent, swap(sent, "{{0,4},{1,5},{2,6},{3,7}}", "{{0,1},{2,3},{4,5},{6,7}}"))


@mutant
def adds_one_part_twice() -> Case:
    return of(EXCHANGED, "add(%k0.pad.a0, %k0.pad.g2)", "add(%k0.pad.a0, %k0.pad.g1)")


@mutant
def leaves_a_part_out() -> Case:
    return of(EXCHANGED, "all-reduce(%k0.pad.a2)", "all-reduce(%k0.pad.a1)")


@mutant
def sends_one_part_to_two() -> Case:
    return of(EXCHANGED, "all-to-all(%k0.pad.s0, %k0.pad.s1", "all-to-all(%k0.pad.s0, %k0.pad.s0")


@mutant
def gathers_the_other_hosts_pieces() -> Case:
    return Case(
        GATHERED.plain, shaped_gather((3, 4, 5), 1, [[[4, 0], [5, 1], [6, 2], [7, 3]], INSIDE])
    )


@mutant
def gathers_inside_first_and_turns_as_if_across() -> Case:
    return Case(
        plain_gather((3, 4), 1, along((2, 2, 2), 1, 2)),
        shaped_gather((3, 4), 1, [along((2, 2, 2), 2), along((2, 2, 2), 1)]),
    )


@mutant
def turns_the_wrong_way() -> Case:
    text = swap(GATHERED.shaped, "dimensions={2,1,0,3,4}", "dimensions={2,0,1,3,4}")
    return Case(GATHERED.plain, swap(text, "f32[3,2,4,4,5] transpose", "f32[3,4,2,4,5] transpose"))


@mutant
def does_not_turn() -> Case:
    turned = "f32[3,2,4,4,5] transpose(%s.got1), dimensions={2,1,0,3,4}"
    return of(GATHERED, turned, "f32[4,2,3,4,5] reshape(%s.got1)")


@mutant
def gathers_along_another_dimension() -> Case:
    shaped = shaped_gather((4, 4), 0, [ACROSS, INSIDE])
    return Case(plain_gather((4, 4), 1, ALL), swap(shaped, "f32[32,4]", "f32[4,32]"))


@mutant
def gathers_one_piece_twice() -> Case:
    got = "replica_groups={{0,4},{1,5},{2,6},{3,7}}"
    return of(GATHERED, got, "replica_groups={{0,0},{1,5},{2,6},{3,7}}")


@mutant
def scatters_along_another_dimension() -> Case:
    shaped = shaped_scatter((16, 16), 0, INSIDE, ACROSS)
    return Case(plain_scatter((16, 16), 1, ALL), swap(shaped, "f32[2,16]", "f32[16,2]"))


@mutant
def starts_elsewhere() -> Case:
    """The plain module's table has two devices the other way round."""
    return Case(plain_scatter((16, 24), 1, ALL, (0, 1, 2, 3, 4, 5, 7, 6)), SCATTERED.shaped)


@mutant
def starts_in_the_middle_of_a_piece() -> Case:
    return Case(
        swap(SCATTERED.plain, "%size = s32[1] constant({3})", "%size = s32[1] constant({2})"),
        SCATTERED.shaped,
    )


@mutant
def scatters_across_first() -> Case:
    return Case(SCATTERED.plain, shaped_scatter((16, 24), 1, ACROSS, INSIDE))


@mutant
def splits_the_other_way() -> Case:
    text = swap(SCATTERED.shaped, "f32[16,2,4,3] reshape", "f32[16,4,2,3] reshape")
    return Case(SCATTERED.plain, swap(text, "dimensions={2,1,0,3}", "dimensions={1,2,0,3}"))


@mutant
def scatters_without_the_other_host() -> Case:
    text = without(SCATTERED.shaped, "s.far")
    return Case(
        SCATTERED.plain,
        swap(text, "reshape(%s.far)", "slice(%s.host), slice={[0:1], [0:16], [0:3]}"),
    )


@mutant
def sums_in_the_loop_and_behind_it() -> Case:
    return Case(IN_LOOP, loop(summed("t"), summed("total")))


@mutant
def never_sums_in_a_loop() -> Case:
    return Case(IN_LOOP, loop(unchanged("t"), unchanged("total")))


@mutant
def sums_behind_the_loop_inside_the_host() -> Case:
    return Case(IN_LOOP, loop(unchanged("t"), summed("total", INSIDE)))


def moved(old: str, new: str) -> Case:
    """A sum moved out of a loop where both modules have something else that forbids it."""
    return Case(swap(MOVED.plain, old, new), swap(MOVED.shaped, old, new))


@mutant
def sums_a_carry_that_starts_from_ones() -> Case:
    return moved("%zero = f32[] constant(0)", "%zero = f32[] constant(1)")


@mutant
def sums_a_carry_that_starts_from_an_argument() -> Case:
    return moved("tuple(%nil, %zeros, %x)", "tuple(%nil, %x, %x)")


@mutant
def sums_a_carry_that_the_loop_reads() -> Case:
    return moved("%t = f32[6,8] tanh(%v)", "%t = f32[6,8] multiply(%v, %acc)")


@mutant
def sums_a_carry_that_is_carried_twice() -> Case:
    return moved("tuple(%next, %more, %v)", "tuple(%next, %more, %more)")


@mutant
def sums_a_carry_that_becomes_another() -> Case:
    return moved("tuple(%next, %more, %v)", "tuple(%next, %v, %more)")


@mutant
def sums_a_carry_that_the_condition_reads() -> Case:
    read = "%seen = f32[6,8] get-tuple-element(%d), index=1\n  %last ="
    return moved("%last =", read)


@mutant
def sums_a_carry_that_is_subtracted() -> Case:
    return moved("%more = f32[6,8] add(%acc", "%more = f32[6,8] subtract(%acc")


@mutant
def runs_the_loop_more_often() -> Case:
    return of(MOVED, "%last = s32[] constant(4)", "%last = s32[] constant(5)")


@mutant
def adds_another_term() -> Case:
    return of(MOVED, "add(%acc, %t)", "add(%acc, %v)")


@mutant
def sums_another_element_of_the_loop() -> Case:
    return of(MOVED, "get-tuple-element(%loop), index=1", "get-tuple-element(%loop), index=2")


@pytest.mark.parametrize("make", MUTANTS, ids=lambda make: make.__name__)
def test_kills_the_mutant(make: Callable[[], Case]) -> None:
    case = make()
    check(Case(case.plain, case.plain, case.partitions, case.wire))
    with pytest.raises(NotThePlainModuleError):
        check(case)


def test_has_many_mutants() -> None:
    assert len(MUTANTS) >= 40


def test_an_argument_that_nothing_reads_stays_as_it_is() -> None:
    texts = []
    for unread in ("f32[7]", "f32[8]"):
        lines = Lines()
        lines.put("x", "f32[4]", "parameter(0)")
        lines.put("y", unread, "parameter(1)")
        lines.send("s", "f32[4]", "all-reduce", "%x", ALL)
        lines.put("out", "(f32[4])", "tuple(%s)")
        texts.append(module(lines))
    check(Case(texts[0], texts[0]))
    with pytest.raises(NotThePlainModuleError, match="has other arguments"):
        check(Case(*texts))
