"""Modules with one fault each in their compositions of collectives."""

import re
from collections.abc import Callable
from dataclasses import replace

from tests.verify import shaped_modules as modules
from tests.verify.compositions import across, inside
from tests.verify.shaped_modules import ADD, IN_LOOP, Pair

INNER, OUTER = "{{0,1,2,3},{4,5,6,7}}", "{{0,4},{1,5},{2,6},{3,7}}"
MUTANTS: dict[str, Callable[[], Pair]] = {}


def mutant(make: Callable[[], Pair]) -> Callable[[], Pair]:
    MUTANTS[make.__name__] = make
    return make


def changed(pair: Pair, line: str, *changes: tuple[str, str]) -> Pair:
    """Other text in the one line of the shaped module's that begins so."""
    lines = pair.shaped.split("\n")
    (at,) = [number for number, text in enumerate(lines) if text.strip().startswith(f"{line} = ")]
    for old, new in changes:
        assert lines[at].count(old) == 1, (old, lines[at])
        lines[at] = lines[at].replace(old, new)
    return replace(pair, shaped="\n".join(lines))


def with_line(pair: Pair, before: str, line: str) -> Pair:
    """One more line in front of the one that begins so."""
    assert pair.shaped.count(f"  {before} = ") == 1
    return replace(pair, shaped=pair.shaped.replace(f"  {before} = ", f"  {line}\n  {before} = "))


def scattered() -> Pair:
    return modules.scattered_sums(inside(2, 4), across(2, 4))


def twice() -> Pair:
    return modules.sums_twice(2, 4)


def sent() -> Pair:
    return modules.sent_sums(2, 4)


def added() -> Pair:
    return modules.added_sums(2, 4)


def gathered() -> Pair:
    return modules.gathers(2, 4)


def cut() -> Pair:
    return modules.scatters(2, 4)


JOINED, PADDED = "%sum.x.joined", "%sum.x.padded"
NEAR, FAR, BACK = "%sum.x.padded.near0", "%sum.x.padded.near0.far", "%sum.x.padded.near0.far.back0"
SENT = "%sum.x.padded.near"

# sums


@mutant
def another_group_inside() -> Pair:
    return changed(scattered(), NEAR, (INNER, "{{0,1,2,4},{3,5,6,7}}"))


@mutant
def another_group_across() -> Pair:
    return changed(scattered(), FAR, (OUTER, "{{0,5},{1,4},{2,6},{3,7}}"))


@mutant
def groups_that_overlap() -> Pair:
    return changed(scattered(), FAR, (OUTER, "{{0,4},{1,4},{2,6},{3,7}}"))


@mutant
def a_device_without_a_group() -> Pair:
    return changed(scattered(), FAR, (OUTER, "{{0,4},{1,5},{2,6}}"))


@mutant
def a_scatter_in_another_order() -> Pair:
    return changed(scattered(), NEAR, (INNER, "{{1,0,2,3},{4,5,6,7}}"))


@mutant
def a_scatter_in_another_order_on_each_host() -> Pair:
    return changed(scattered(), NEAR, (INNER, "{{1,0,2,3},{5,4,6,7}}"))


@mutant
def a_gather_in_another_order() -> Pair:
    return changed(scattered(), BACK, (INNER, "{{0,1,3,2},{4,5,7,6}}"))


@mutant
def a_sum_counted_twice() -> Pair:
    return changed(twice(), "%sum.x.joined.near.apart.far", (OUTER, INNER))


@mutant
def a_sum_over_all_after_one_inside() -> Pair:
    return changed(twice(), "%sum.x.joined.near.apart.far", (OUTER, "{{0,1,2,3,4,5,6,7}}"))


@mutant
def a_sum_lost_across() -> Pair:
    return changed(twice(), "%sum.x.joined.near.apart.far", (OUTER, "{{0},{1},{2},{3},{4},{5},{6},{7}}"))


@mutant
def a_sum_never_taken() -> Pair:
    return changed(scattered(), "%sum.y", ("%sum.y.part", "%y"))


@mutant
def phases_swapped_with_the_wrong_piece() -> Pair:
    pair = changed(scattered(), NEAR, (INNER, "{{0,4,1,5},{2,6,3,7}}"))
    return changed(pair, FAR, (OUTER, "{{0,2},{1,3},{4,6},{5,7}}"))


@mutant
def padding_with_one() -> Pair:
    return changed(scattered(), "%sum.x.zero", ("constant(0)", "constant(1)"))


@mutant
def padding_with_an_argument() -> Pair:
    pair = changed(scattered(), PADDED, ("%sum.x.zero", "%other"))
    return with_line(pair, PADDED, "%other = f32[] reduce(%x, %sum.x.zero), dimensions={0,1}, to_apply=%add.f")


@mutant
def padding_in_front() -> Pair:
    return changed(scattered(), PADDED, ("0_3", "3_0"))


@mutant
def padding_between() -> Pair:
    return changed(scattered(), PADDED, ("padding=0_3", "padding=0_3_1"))


@mutant
def missing_padding() -> Pair:
    """Of 61 elements one gets 15, and the last one is lost."""
    pair = changed(scattered(), NEAR, ("f32[16]", "f32[15]"), ("(%sum.x.padded)", "(%sum.x.joined)"))
    pair = changed(pair, FAR, ("f32[16]", "f32[15]"))
    return changed(pair, BACK, ("f32[64]", "f32[60]"))


@mutant
def a_slice_elsewhere() -> Pair:
    return changed(scattered(), "%sum.y.part", ("[30:37]", "[29:36]"))


@mutant
def a_slice_with_steps() -> Pair:
    return changed(scattered(), "%sum.y.part", ("[30:37]", "[30:43:2]"))


@mutant
def members_swapped() -> Pair:
    return changed(scattered(), JOINED, ("%sum.x.flat1, %sum.x.flat2", "%sum.x.flat2, %sum.x.flat1"))


@mutant
def a_member_twice() -> Pair:
    pair = changed(scattered(), "%sum.x.flat1", ("%y", "%p1"))
    return pair


@mutant
def another_operand() -> Pair:
    return changed(scattered(), "%sum.x.flat0", ("%x", "%p0"))


@mutant
def another_reduction_inside() -> Pair:
    return changed(scattered(), NEAR, ("%add.f", "%max.f"))


@mutant
def another_reduction_across() -> Pair:
    return changed(scattered(), FAR, ("%add.f", "%mul.f"))


@mutant
def a_reduction_in_another_type() -> Pair:
    return changed(scattered(), FAR, ("%add.f", "%add.b"))


@mutant
def a_channel_twice() -> Pair:
    return changed(scattered(), FAR, ("channel_id=101", "channel_id=100"))


@mutant
def no_channel() -> Pair:
    return changed(scattered(), FAR, ("channel_id=101, ", ""))


@mutant
def groups_of_replicas() -> Pair:
    return changed(scattered(), FAR, (", use_global_device_ids=true", ""))


@mutant
def a_collective_that_nobody_reads() -> Pair:
    return with_line(
        scattered(), "%next", f"%more = f32[7]{{0}} all-reduce(%y), {modules.talk(300, [range(8)])}, {ADD}"
    )


@mutant
def a_collective_that_only_what_nobody_reads_reads() -> Pair:
    pair = with_line(
        scattered(), "%next", f"%more = f32[7]{{0}} all-reduce(%y), {modules.talk(300, [range(8)])}, {ADD}"
    )
    return with_line(pair, "%next", "%seven = f32[7,1]{1,0} reshape(%more)")


def kept(old: str, new: str) -> Pair:
    """A permute and a maximum that stay, but for this text."""
    pair = scattered()
    lines = (
        "  %turn = f32[7]{0} collective-permute(%y), channel_id=50, source_target_pairs={{0,1},{1,0}}\n"
        f"  %most = f32[7]{{0}} all-reduce(%turn), {modules.talk(51, [range(8)])}, to_apply=%max.f\n"
    )
    assert lines.count(old) == 1
    plain = pair.plain.replace("  %note", f"{lines}  %note").replace("(%sum.y), custom", "(%most), custom")
    shaped = pair.shaped.replace("  %note", f"{lines.replace(old, new)}  %note")
    return Pair(plain, shaped.replace("(%sum.y), custom", "(%most), custom"), 8)


@mutant
def a_permute_of_replicas() -> Pair:
    return kept("channel_id=50, ", "")


@mutant
def a_permute_elsewhere() -> Pair:
    return kept("{{0,1},{1,0}}", "{{0,1},{1,2}}")


@mutant
def a_maximum_over_a_part() -> Pair:
    return kept("{{0,1,2,3,4,5,6,7}}", INNER)


@mutant
def a_maximum_become_a_sum() -> Pair:
    return kept("%max.f", "%add.f")


@mutant
def another_layout() -> Pair:
    pair = changed(scattered(), "%x", ("{1,0}", "{0,1}"))
    return replace(pair, plain=pair.plain.replace("%x = f32[6,5]{1,0}", "%x = f32[6,5]{0,1}"))


@mutant
def a_sum_of_sums_in_place_of_a_gather() -> Pair:
    return changed(added(), "%sum.x.padded.plus2", ("row0.swap.got3", "row0.swap.got2"))


@mutant
def a_part_not_added() -> Pair:
    return changed(added(), "%sum.x.padded.piece", ("plus2", "plus1"))


@mutant
def parts_subtracted() -> Pair:
    return changed(added(), "%sum.x.padded.plus1", (" add(", " subtract("))


@mutant
def parts_sent_in_another_order() -> Pair:
    line = "%sum.x.padded.split.row0.swap"
    return changed(added(), line, ("split.row1, %sum.x.padded.split.row2", "split.row2, %sum.x.padded.split.row1"))


@mutant
def a_tuple_of_sums_with_a_member_swapped() -> Pair:
    return changed(modules.tuple_of_sums(), "%sum.x.flat1", ("%y", "%p1"))


# in bfloat16


@mutant
def bfloat16_that_nobody_asked_for() -> Pair:
    return replace(sent(), wire=None)


@mutant
def another_type_than_asked_for() -> Pair:
    return replace(sent(), wire="f16")


@mutant
def parts_swapped_across() -> Pair:
    return changed(sent(), f"{SENT}.swapped", (OUTER, "{{4,0},{5,1},{6,2},{7,3}}"))


@mutant
def parts_of_a_tuple_swapped() -> Pair:
    pair = modules.sent_sums(2, 4, tuples=True)
    line = re.search(r"%\S*bits\.row0\.swap = ", pair.shaped)
    assert line
    name = line[0].removesuffix(" = ")
    parts = re.search(re.escape(f"{name} = ") + r".* all-to-all\((\S+), (\S+)\)", pair.shaped)
    assert parts
    return changed(pair, name, (f"{parts[1]}, {parts[2]}", f"{parts[2]}, {parts[1]}"))


@mutant
def a_sum_in_bfloat16() -> Pair:
    pair = changed(sent(), f"{SENT}.total", ("f32[8]", "bf16[8]"), (".wide", ".numbers"), ("%add.f", "%add.b"))
    pair = changed(pair, f"{SENT}.none", ("f32[]", "bf16[]"))
    return changed(pair, f"{SENT}.code", (".again", ".total"))


@mutant
def rounded_before_the_sum_inside() -> Pair:
    pair = with_line(sent(), SENT, f"%short = bf16[64]{{0}} convert({PADDED})")
    pair = with_line(pair, SENT, "%wide = f32[64]{0} convert(%short)")
    return changed(pair, SENT, (f"({PADDED})", "(%wide)"))


@mutant
def summed_inside_in_bfloat16() -> Pair:
    pair = with_line(sent(), SENT, f"%short = bf16[64]{{0}} convert({PADDED})")
    pair = with_line(pair, SENT, f"%sum = bf16[16]{{0}} reduce-scatter(%short), {modules.talk(300, inside(2, 4))}, "
                     "dimensions={0}, to_apply=%add.b")  # fmt: skip
    return changed(pair, SENT, (f"reduce-scatter({PADDED})", "convert(%sum)"), (re_end(pair), ""))


def re_end(pair: Pair) -> str:
    """What follows the operand of the scatter inside hosts."""
    found = re.search(rf"{re.escape(SENT)} = .* reduce-scatter\({re.escape(PADDED)}\)(.*)", pair.shaped)
    assert found
    return found[1]


@mutant
def rounded_again_behind_the_sum() -> Pair:
    pair = with_line(sent(), "%sum.x.padded.end", f"%short = bf16[16]{{0}} convert({SENT}.done)")
    pair = with_line(pair, "%sum.x.padded.end", "%wide = f32[16]{0} convert(%short)")
    return changed(pair, "%sum.x.padded.end", (f"({SENT}.done)", "(%wide)"))


@mutant
def rounded_without_being_sent() -> Pair:
    pair = with_line(scattered(), BACK, f"%short = bf16[16]{{0}} convert({FAR})")
    pair = with_line(pair, BACK, "%wide = f32[16]{0} convert(%short)")
    return replace(changed(pair, BACK, (f"({FAR})", "(%wide)")), wire="bf16")


@mutant
def bits_of_another_kind() -> Pair:
    return changed(sent(), f"{SENT}.numbers", ("bf16[2,8]", "f16[2,8]"))


# gathers


@mutant
def a_gather_of_the_other_hosts_pieces() -> Pair:
    return changed(gathered(), "%all.0.far", (OUTER, "{{4,0},{5,1},{6,2},{7,3}}"))


@mutant
def a_gather_inside_twice() -> Pair:
    return changed(modules.gathers(2, 2), "%all.1.far", ("{{0,2},{1,3}}", "{{0,1},{2,3}}"))


@mutant
def a_gather_with_another_transposition() -> Pair:
    return changed(modules.gathers(2, 2), "%all.0.turned", ("{1,0,2,3,4}", "{0,1,2,3,4}"))


@mutant
def a_gather_along_another_dimension() -> Pair:
    pair = changed(modules.gathers(2, 2), "%all.1.turned", ("[6,2,2,4,10]", "[6,4,2,2,10]"), ("{2,1,0", "{2,3,1"),
                   (",3,4}", ",0,4}"))  # fmt: skip
    return pair


@mutant
def a_gather_of_another_value() -> Pair:
    pair = with_line(gathered(), "%all.2.one", "%q = f32[6,4,10]{2,1,0} negate(%p)")
    return changed(pair, "%all.2.one", ("%p", "%q"))


# scatters


@mutant
def a_scatter_along_another_dimension() -> Pair:
    pair = changed(cut(), "%piece.y.split", ("[16,2,4,3,4]", "[2,4,2,24,4]"))
    pair = changed(pair, "%piece.y.turned", ("[4,2,16,3,4]", "[4,2,2,24,4]"), ("{2,1,0,3,4}", "{1,0,2,3,4}"))
    return pair


@mutant
def a_scatter_without_its_transposition() -> Pair:
    pair = changed(modules.scatters(2, 2), "%piece.x.turned", ("{1,0,2,3,4}", "{0,1,2,3,4}"))
    return pair


@mutant
def a_scatter_across_in_another_order() -> Pair:
    return changed(cut(), "%piece.x.far", (OUTER, "{{4,0},{5,1},{6,2},{7,3}}"))


@mutant
def a_scatter_inside_in_another_order() -> Pair:
    return changed(cut(), "%piece.y.near", (INNER, "{{0,1,3,2},{4,5,7,6}}"))


@mutant
def another_table_of_offsets() -> Pair:
    pair = cut()
    assert "constant({0, 1, 2, 3," in pair.plain
    return replace(pair, plain=pair.plain.replace("constant({0, 1, 2, 3,", "constant({0, 2, 1, 3,"))


@mutant
def another_factor_of_offsets() -> Pair:
    pair = cut()
    return replace(pair, plain=pair.plain.replace("%rows = s32[] constant(2)", "%rows = s32[] constant(1)"))


@mutant
def pieces_of_another_sum() -> Pair:
    return changed(cut(), "%piece.x.split", ("%x", "%y"))


# loops


@mutant
def a_carry_that_the_loop_reads() -> Pair:
    plain = modules.module(modules.loop_entry([]), modules.loop_body("s", "%acc", IN_LOOP))
    pair = modules.sum_behind_a_loop()
    shaped = pair.shaped.replace("tanh(%w)", "tanh(%acc)")
    assert shaped != pair.shaped
    return Pair(plain, shaped, 8)


@mutant
def a_carry_that_starts_from_ones() -> Pair:
    pair = modules.sum_behind_a_loop()
    old, new = "%start = f32[] constant(0)", "%start = f32[] constant(1)"
    return Pair(pair.plain.replace(old, new), pair.shaped.replace(old, new), 8)


@mutant
def a_carry_from_ones_in_one_module() -> Pair:
    return changed(modules.sum_behind_a_loop(), "%start", ("constant(0)", "constant(1)"))


@mutant
def a_sum_in_the_loop_and_behind() -> Pair:
    pair = modules.sum_behind_a_loop()
    return replace(pair, shaped=pair.shaped.replace(modules.loop_body("t"), modules.loop_body("s", lines=IN_LOOP)))


@mutant
def a_sum_neither_in_the_loop_nor_behind() -> Pair:
    pair = modules.sum_behind_a_loop()
    shaped = modules.module(modules.loop_entry([]), modules.loop_body("t"))
    return replace(pair, shaped=shaped)


@mutant
def a_loop_that_runs_once_more() -> Pair:
    return changed(modules.sum_behind_a_loop(), "%four", ("constant(4)", "constant(5)"))


@mutant
def another_group_behind_the_loop() -> Pair:
    return changed(modules.sum_behind_a_loop(), "%grad", ("{{0,1,2,3,4,5,6,7}}", INNER))


@mutant
def another_group_in_the_loop() -> Pair:
    return changed(modules.sum_in_a_loop(), "%s.padded.near0.far", (OUTER, INNER))


# beside the collectives


@mutant
def an_effect_more() -> Pair:
    line = '%extra = f32[7]{0} custom-call(%sum.y), custom_call_target="note", custom_call_has_side_effect=true'
    return with_line(scattered(), "%next", line)


@mutant
def an_effect_lost() -> Pair:
    pair = scattered()
    return replace(pair, shaped=re.sub(r"  %note = .*\n", "", pair.shaped))


@mutant
def effects_in_another_order() -> Pair:
    pair = scattered()
    note = re.search(r"  %note = .*\n", pair.plain)
    assert note
    other = note[0].replace("%note", "%again").replace("%sum.y", "%y")
    return replace(
        pair, plain=pair.plain.replace(note[0], note[0] + other), shaped=pair.shaped.replace(note[0], other + note[0])
    )


@mutant
def outputs_swapped() -> Pair:
    pair = twice()
    old, new = "custom-call(%sum.y)", "custom-call(%y)"
    return replace(pair, shaped=pair.shaped.replace(old, new))


@mutant
def another_output() -> Pair:
    pair = scattered()
    assert "tuple(%next, %sum.y, %sum.z)" in pair.shaped
    return replace(pair, shaped=pair.shaped.replace("tuple(%next, %sum.y, %sum.z)", "tuple(%sum.x, %sum.y, %sum.z)"))


@mutant
def an_argument_not_donated() -> Pair:
    pair = scattered()
    return replace(pair, shaped=pair.shaped.replace(", input_output_alias={ {0}: (0, {}, may-alias) }", ""))


@mutant
def another_argument_donated() -> Pair:
    pair = scattered()
    return replace(pair, shaped=pair.shaped.replace("{0}: (0, {}", "{0}: (1, {}"))


@mutant
def another_instruction() -> Pair:
    return changed(scattered(), "%next", ("multiply(", "add("))


@mutant
def an_instruction_more() -> Pair:
    return with_line(scattered(), "%next", "%more = f32[6,5]{1,0} exponential(%sum.x)")


@mutant
def an_instruction_twice() -> Pair:
    return with_line(scattered(), "%next", "%more = f32[6,5]{1,0} tanh(%p0)")


@mutant
def a_barrier_lost() -> Pair:
    pair = twice()
    return replace(pair, plain=pair.shaped, shaped=pair.shaped.replace("opt-barrier(", "reshape("))


@mutant
def an_order_lost() -> Pair:
    pair = scattered()
    old = "%next = f32[6,5]{1,0} multiply(%p0, %sum.x)"
    assert old in pair.plain
    return replace(pair, plain=pair.plain.replace(old, f"{old}, control-predecessors={{%note}}"))


@mutant
def read_before_it_is_made() -> Pair:
    pair = scattered()
    line = re.search(r"  %next = .*\n", pair.shaped)
    assert line
    rest = pair.shaped.replace(line[0], "")
    return replace(pair, shaped=rest.replace("  %sum.x.flat0 = ", line[0] + "  %sum.x.flat0 = "))
