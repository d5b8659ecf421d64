"""Pairs of modules: a plain one, and one with its collectives in phases that computes the same."""

from collections.abc import Callable
from dataclasses import dataclass

from tests.verify.compositions import Dims, Groups, Writer, across, inside, listed, module, shape

ADD = "to_apply=%add.f"


@dataclass(frozen=True)
class Pair:
    plain: str
    shaped: str
    partitions: int
    wire: str | None = None


def talk(channel: int, groups: Groups) -> str:
    return f"channel_id={channel}, replica_groups={listed(groups)}, use_global_device_ids=true"


# sums

SUMS: tuple[tuple[str, str, Dims], ...] = (("sum.x", "x", (6, 5)), ("sum.y", "y", (7,)), ("sum.z", "z", (2, 3, 4)))


def _ends_of_sums() -> tuple[list[str], list[str]]:
    before = [f"%p{number} = {shape(dims)} parameter({number})" for number, (*_, dims) in enumerate(SUMS)]
    before += [f"%{given} = {shape(dims)} tanh(%p{number})" for number, (_, given, dims) in enumerate(SUMS)]
    shapes = ", ".join(shape(dims) for *_, dims in SUMS)
    after = [
        f'%note = {shape((7,))} custom-call(%sum.y), custom_call_target="note", custom_call_has_side_effect=true',
        f"%next = {shape((6, 5))} multiply(%p0, %sum.x)",
        f"ROOT %out = ({shapes}) tuple(%next, %sum.y, %sum.z)",
    ]
    return before, after


def sums(whole: Groups, write: Callable[[Writer], None], partitions: int, wire: str | None = None) -> Pair:
    before, after = _ends_of_sums()
    plain = [
        f"%{name} = {shape(dims)} all-reduce(%{given}), {talk(number, whole)}, {ADD}"
        for number, (name, given, dims) in enumerate(SUMS, 1)
    ]
    writer = Writer()
    write(writer)
    return Pair(module(before + plain + after), module(before + writer.lines + after), partitions, wire)


def scattered_sums(*levels: Groups) -> Pair:
    multiple = 1
    for groups in levels[:-1]:
        multiple *= len(groups[0])
    count = sum(map(len, levels[0]))
    whole = [list(range(count))]
    return sums(
        whole, lambda to: to.bucket(SUMS, lambda given, size: to.scattered(given, size, levels), multiple), count
    )


def sums_twice(hosts: int, devices: int) -> Pair:
    inner, outer, count = inside(hosts, devices), across(hosts, devices), hosts * devices
    return sums(
        [list(range(count))],
        lambda to: to.bucket(SUMS, lambda given, size: to.twice(given, size, inner, outer), 1),
        count,
    )


def two_buckets(hosts: int, devices: int) -> Pair:
    levels = inside(hosts, devices), across(hosts, devices)

    def write(to: Writer) -> None:
        for some in (SUMS[:1], SUMS[1:]):
            to.bucket(some, lambda given, size: to.scattered(given, size, levels), devices)

    return sums([list(range(hosts * devices))], write, hosts * devices)


def sent_sums(hosts: int, devices: int, tuples: bool = False) -> Pair:
    inner, outer, count = inside(hosts, devices), across(hosts, devices), hosts * devices
    return sums(
        [list(range(count))],
        lambda to: to.bucket(SUMS, lambda given, size: to.scattered_and_sent(given, size, inner, outer, tuples), count),
        count,
        "bf16",
    )


def added_sums(hosts: int, devices: int) -> Pair:
    """The reduce-scatter as an all-to-all and adds."""
    inner, outer, count = inside(hosts, devices), across(hosts, devices), hosts * devices

    def phases(to: Writer, given: str, size: int) -> str:
        piece = to.added_parts(given, size, inner)
        far = to.all_reduce("far", piece, [size // devices], outer)
        return to.put("back", [size], f"all-gather(%{far}), {to.talk(inner)}, dimensions={{0}}")

    return sums(
        [list(range(count))],
        lambda to: to.bucket(SUMS, lambda given, size: phases(to, given, size), devices),
        count,
    )


def permuted_sums() -> Pair:
    """Hosts of devices that are not side by side."""
    inner, outer = [[0, 5, 2, 7], [4, 1, 6, 3]], [[4, 0], [5, 1], [2, 6], [3, 7]]
    return scattered_sums(inner, outer)


def sums_over_a_part() -> Pair:
    """Of three axes 2x2x2, over the first two; hosts are the first."""
    whole = [[0, 2, 4, 6], [1, 3, 5, 7]]
    levels = [[0, 2], [1, 3], [4, 6], [5, 7]], [[0, 4], [1, 5], [2, 6], [3, 7]]
    return sums(whole, lambda to: to.bucket(SUMS, lambda given, size: to.scattered(given, size, levels), 2), 8)


def tuple_of_sums() -> Pair:
    """One all-reduce of three operands."""
    before, after = _ends_of_sums()
    shapes = ", ".join(shape(dims) for *_, dims in SUMS)
    given = ", ".join(f"%{operand}" for _, operand, _ in SUMS)
    plain = [f"%sums = ({shapes}) all-reduce({given}), {talk(1, [range(8)])}, {ADD}"]
    plain += [
        f"%{name} = {shape(dims)} get-tuple-element(%sums), index={number}"
        for number, (name, _, dims) in enumerate(SUMS)
    ]
    writer = Writer()
    writer.bucket(SUMS, lambda given, size: writer.scattered(given, size, [inside(2, 4), across(2, 4)]), 4)
    return Pair(module(before + plain + after), module(before + writer.lines + after), 8)


# gathers and scatters


def gathers(hosts: int, devices: int) -> Pair:
    """Along each of three dimensions."""
    dims, count = (6, 4, 10), hosts * devices
    before = [f"%p = {shape(dims)} parameter(0)"]
    plain, to = list[str](), Writer()
    wholes = [tuple(size * count if at == dim else size for at, size in enumerate(dims)) for dim in range(3)]
    for dim, whole in enumerate(wholes):
        groups = talk(dim + 1, [range(count)])
        plain.append(f"%all.{dim} = {shape(whole)} all-gather(%p), {groups}, dimensions={{{dim}}}")
        to.gather(f"all.{dim}", "p", dims, dim, inside(hosts, devices), across(hosts, devices))
    after = [f"%use.{dim} = {shape(whole)} negate(%all.{dim})" for dim, whole in enumerate(wholes)]
    uses = ", ".join(f"%use.{dim}" for dim in range(3))
    after.append(f"ROOT %out = ({', '.join(map(shape, wholes))}) tuple({uses})")
    return Pair(module(before + plain + after), module(before + to.lines + after), count)


def _offsets(count: int) -> list[str]:
    table = ", ".join(map(str, range(count)))
    return [
        "%id = u32[] partition-id()",
        "%signed = s32[] convert(%id)",
        "%zero = s32[] constant(0)",
        "%rows = s32[] constant(2)",
        "%row = s32[] multiply(%signed, %rows)",
        f"%table = u32[{count}]{{0}} constant({{{table}}})",
        "%entry = u32[1]{0} dynamic-slice(%table, %id), dynamic_slice_sizes={1}",
        "%least = u32[1]{0} constant({0})",
        f"%most = u32[1]{{0}} constant({{{count - 1}}})",
        "%held = u32[1]{0} clamp(%least, %entry, %most)",
        "%place = s32[1]{0} convert(%held)",
        "%width = s32[1]{0} constant({3})",
        "%moved = s32[1]{0} multiply(%place, %width)",
        "%column = s32[] reshape(%moved)",
    ]


def scatters(hosts: int, devices: int) -> Pair:
    """Along the first dimension by a product, along the second by a table."""
    count = hosts * devices
    dims, rows, columns = (2 * count, 3 * count, 4), (2, 3 * count, 4), (2 * count, 3, 4)
    whole = shape(dims)
    before = [f"%p = {whole} parameter(0)", f"%x = {whole} tanh(%p)", f"%y = {whole} negate(%p)", *_offsets(count)]

    def cut(name: str, given: str, starts: str, sizes: Dims) -> str:
        said = ",".join(map(str, sizes))
        return f"%{name} = {shape(sizes)} dynamic-slice(%{given}, {starts}), dynamic_slice_sizes={{{said}}}"

    plain = [
        f"%sum.x = {whole} all-reduce(%x), {talk(1, [range(count)])}, {ADD}",
        f"%sum.y = {whole} all-reduce(%y), {talk(2, [range(count)])}, {ADD}",
        cut("piece.x", "sum.x", "%row, %zero, %zero", rows),
        cut("piece.y", "sum.y", "%zero, %column, %zero", columns),
    ]
    to = Writer()
    to.scatter("piece.x", "x", dims, 0, inside(hosts, devices), across(hosts, devices))
    to.scatter("piece.y", "y", dims, 1, inside(hosts, devices), across(hosts, devices))
    after = [
        f"%a = {shape(rows)} negate(%piece.x)",
        f"%b = {shape(columns)} negate(%piece.y)",
        f"ROOT %out = ({shape(rows)}, {shape(columns)}) tuple(%a, %b)",
    ]
    return Pair(module(before + plain + after), module(before + to.lines + after), count)


# loops

CARRIED = "(s32[], f32[6,5]{1,0}, f32[6,5]{1,0})"


def loop_body(given: str, read: str = "%w", lines: str = "") -> str:
    return f"""%body (c: s32[]) -> s32[] {{
  %c = {CARRIED} parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %one = s32[] constant(1)
  %j = s32[] add(%i, %one)
  %acc = f32[6,5]{{1,0}} get-tuple-element(%c), index=1
  %w = f32[6,5]{{1,0}} get-tuple-element(%c), index=2
  %t = f32[6,5]{{1,0}} tanh({read})
{lines}  %acc.next = f32[6,5]{{1,0}} add(%acc, %{given})
  ROOT %next = {CARRIED} tuple(%j, %acc.next, %w)
}}

%condition (c: s32[]) -> pred[] {{
  %c = {CARRIED} parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %four = s32[] constant(4)
  ROOT %more = pred[] compare(%i, %four), direction=LT
}}"""


def loop_entry(lines: list[str], carried: str = "grad", start: str = "0") -> list[str]:
    return [
        "%w0 = f32[6,5]{1,0} parameter(0)",
        "%i0 = s32[] constant(0)",
        f"%start = f32[] constant({start})",
        "%acc0 = f32[6,5]{1,0} broadcast(%start), dimensions={}",
        f"%first = {CARRIED} tuple(%i0, %acc0, %w0)",
        f"%loop = {CARRIED} while(%first), condition=%condition, body=%body",
        f"%{carried} = f32[6,5]{{1,0}} get-tuple-element(%loop), index=1",
        *lines,
        "ROOT %out = f32[6,5]{1,0} multiply(%w0, %grad)",
    ]


IN_LOOP = f"  %s = f32[6,5]{{1,0}} all-reduce(%t), {talk(1, [range(8)])}, {ADD}\n"


def sum_behind_a_loop(in_phases: bool = False) -> Pair:
    to = Writer()
    if in_phases:
        to.bucket(
            [("grad", "terms", (6, 5))],
            lambda given, size: to.scattered(given, size, [inside(2, 4), across(2, 4)]),
            4,
        )
    else:
        to.all_reduce("grad", "terms", (6, 5), [range(8)])
    plain = module(loop_entry([]), loop_body("s", lines=IN_LOOP))
    return Pair(plain, module(loop_entry(to.lines, "terms"), loop_body("t")), 8)


def sum_in_a_loop() -> Pair:
    """In phases, where it was."""
    to = Writer()
    to.bucket([("s", "t", (6, 5))], lambda given, size: to.scattered(given, size, [inside(2, 4), across(2, 4)]), 4)
    lines = "".join(f"  {line}\n" for line in to.lines)
    plain = module(loop_entry([], start="1"), loop_body("s", lines=IN_LOOP))
    return Pair(plain, module(loop_entry([], start="1"), loop_body("s", lines=lines)), 8)
