"""All-reduces in phases and buckets, narrow between hosts: what is written, and which stay."""

from collections.abc import Iterator, Sequence

import pytest

from memplan.hardware.backend import CPU, GPU, Backend
from memplan.hardware.machine import Machine
from memplan.hardware.topology import topology_named
from memplan.xla.collectives.sums import sums_in_phases
from memplan.xla.collectives.wire import Wire
from memplan.xla.module import Instruction, Module
from memplan.xla.shapes import Array, Shape
from tests.hardware.machines import on
from tests.hlo import groups_text, read_module, short_lines_of, text_of
from tests.xla.collectives.links import steep

TODAY = on(topology_named("today@2x4"), 8)
WIRE = Wire.named("bfloat16")
STEEP = steep(2, 4)
ALL, INSIDE, ACROSS = "{{0,1,2,3,4,5,6,7}}", "{{0,1,2,3},{4,5,6,7}}", "{{0,4},{1,5},{2,6},{3,7}}"
SCOPE = "jit(step)/transpose"
TOLD = f', metadata={{op_name="{SCOPE}"}}'
REDUCERS = "".join(
    f"""
%{name} (x.{name}: {dtype}[], y.{name}: {dtype}[]) -> {dtype}[] {{
  %x.{name} = {dtype}[] parameter(0)
  %y.{name} = {dtype}[] parameter(1)
  ROOT %z.{name} = {dtype}[] {opcode}(%x.{name}, %y.{name})
}}
"""
    for name, dtype, opcode in (
        ("add", "f32", "add"),
        ("most", "f32", "maximum"),
        ("double", "f64", "add"),
        ("count", "s32", "add"),
    )
)


def module(lines: str, parameters: str = "a: f32[512,512]", result: str = "f32[512,512]") -> Module:
    """A module of eight partitions with these lines in its entry."""
    body = "\n".join(f"  {line.strip()}" for line in lines.strip().splitlines())
    text = f"HloModule step, num_partitions=8\n{REDUCERS}\nENTRY %main ({parameters}) -> {result} {{\n{body}\n}}\n"
    return read_module(text, scheduled=False)


def all_reduce(
    operand: str, channel: int = 1, groups: str = ALL, add: str = "add", more: str = ""
) -> str:
    where = f"channel_id={channel}, replica_groups={groups}, use_global_device_ids=true"
    return f"all-reduce({operand}), {where}, to_apply=%{add}{more}"


def shaped(
    plain: Module,
    machine: Machine = STEEP,
    backend: Backend = GPU,
    wire: Wire | None = WIRE,
) -> Module:
    """In phases, and as XLA reads it: with operands first, names and channels of their own."""
    module = sums_in_phases(plain, machine, backend, wire)
    text_of(module)
    channels = [op.channel for op in module.entry.ops.values() if op.channel is not None]
    assert len(channels) == len(set(channels))
    return module


def collectives(hlo: Module) -> Iterator[Instruction]:
    kinds = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all")
    return (op for op in hlo.entry.ops.values() if op.opcode in kinds)


def told(hlo: Module) -> list[tuple[str, str, str]]:
    """Opcode, shape and groups of the collectives."""
    return [(op.opcode, short(op.result[0]), groups_text(op.groups(8))) for op in collectives(hlo)]


def short(shape: Shape) -> str:
    """The text of an array's shape without its layout."""
    assert isinstance(shape, Array)
    return str(Array(shape.dtype, shape.dims))


def buckets(hlo: Module) -> list[list[str]]:
    """What travels together, in the order of the text: operands of the first sums over hosts."""
    ops = hlo.entry.ops
    wholes = [
        op
        for op in collectives(hlo)
        if op.opcode in ("reduce-scatter", "all-reduce") and ".sum" not in op.name
    ]
    return [_members(hlo, ops[op.operands[0]]) for op in wholes]


def _members(hlo: Module, op: Instruction) -> list[str]:
    while op.opcode == "pad":
        op = hlo.entry.ops[op.operands[0]]
    parts: Sequence[str] = op.operands if op.opcode == "concatenate" else [op.name]
    return [hlo.entry.ops[part].operands[0] if ".flat" in part else part for part in parts]


def lone_sum(
    dtype: str = "f32",
    dims: str = "512,512",
    groups: str = ALL,
    add: str = "add",
    layout: str = "",
    ids: bool = True,
) -> Module:
    """A module of one all-reduce; without `ids` its groups are replicas."""
    array, summed = f"{dtype}[{dims}]", all_reduce("%a", groups=groups, add=add)
    if not ids:
        summed = summed.replace(", use_global_device_ids=true", "")
    lines = f"%a = {array}{layout} parameter(0)\nROOT %s = {array}{layout} {summed}"
    return module(lines, f"a: {array}", array)


def test_parts_are_added_in_the_host_first_and_then_across_hosts() -> None:
    plain = module(
        f"""
        %a = f32[512,512]{{1,0}} parameter(0)
        %s = f32[512,512]{{1,0}} {all_reduce("%a", more=TOLD)}
        ROOT %n = f32[512,512]{{1,0}} negate(%s)
        """
    )
    hlo = shaped(plain)
    assert told(hlo) == [
        ("reduce-scatter", "f32[65536]", INSIDE),
        ("all-to-all", "u16[2,32768]", ACROSS),
        ("all-gather", "u16[65536]", ACROSS),
        ("all-gather", "f32[262144]", INSIDE),
    ]
    lines = short_lines_of(hlo)
    assert lines[:3] == [
        "%a = f32[512,512] parameter(0)",
        "%s.flat1 = f32[262144] reshape(%a)",
        f"%s.scatter1 = f32[65536] reduce-scatter(%s.flat1), channel_id=2, replica_groups={INSIDE}, "
        "use_global_device_ids=true, dimensions={0}, to_apply=%add",
    ]
    assert lines[-2:] == [
        "%s = f32[512,512] reshape(%s.gather1)",
        "ROOT %n = f32[512,512] negate(%s)",
    ]
    (added,) = (op for op in hlo.entry.ops.values() if op.opcode == "reduce")
    assert short(added.shape) == "f32[32768]"
    assert [short(op.shape) for op in hlo.entry.ops.values() if "bf16" in str(op.shape)] == [
        "bf16[2,32768]", "bf16[2,32768]", "bf16[32768]", "bf16[65536]"
    ]  # fmt: skip
    scopes = {op.op_name for op in hlo.entry.ops.values() if op.name.startswith("s")}
    assert scopes == {SCOPE}
    assert hlo.entry.ops["s"].shape == plain.entry.ops["s"].shape


def test_three_levels() -> None:
    inner, middle, outer = "{{0,1},{2,3},{4,5},{6,7}}", "{{0,2},{1,3},{4,6},{5,7}}", ACROSS
    assert told(shaped(lone_sum(dims="64,8"), steep(2, 2, 2))) == [
        ("reduce-scatter", "f32[256]", inner),
        ("reduce-scatter", "f32[128]", middle),
        ("all-to-all", "u16[2,64]", outer),
        ("all-gather", "u16[128]", outer),
        ("all-gather", "f32[256]", middle),
        ("all-gather", "f32[512]", inner),
    ]


def test_groups_that_are_a_part_of_the_machine() -> None:
    pairs, halves = "{{0,1},{2,3},{4,5},{6,7}}", "{{0,1,4,5},{2,3,6,7}}"
    assert told(shaped(lone_sum(dims="64", groups=halves))) == [
        ("reduce-scatter", "f32[32]", "{{0,1},{4,5},{2,3},{6,7}}"),
        ("all-to-all", "u16[2,16]", "{{0,4},{1,5},{2,6},{3,7}}"),
        ("all-gather", "u16[32]", "{{0,4},{1,5},{2,6},{3,7}}"),
        ("all-gather", "f32[64]", "{{0,1},{4,5},{2,3},{6,7}}"),
    ]
    same_host = lone_sum(groups=pairs)
    assert shaped(same_host) is same_host


def test_small_sums_stay() -> None:
    """Where four collectives take longer than the bytes that they save."""
    small, large = lone_sum(dims="512,512"), lone_sum(dims="4096,512")
    assert shaped(small, TODAY) is small
    assert told(shaped(large, TODAY))[1] == ("all-to-all", "u16[2,262144]", ACROSS)


def test_zeros_behind_what_does_not_divide() -> None:
    entry = shaped(lone_sum(dims="7,3")).entry
    (pad,) = (op for op in entry.ops.values() if op.opcode == "pad")
    assert short(pad.shape) == "f32[24]"
    assert pad.padding == ((0, 3, 0),)
    assert entry.ops[pad.operands[1]].is_positive_zero
    (part,) = (op for op in entry.ops.values() if op.opcode == "slice")
    assert (short(part.shape), part.slices) == ("f32[21]", ((0, 21, 1),))


@pytest.mark.parametrize(
    "stays",
    [
        lone_sum(add="most"),
        lone_sum("s32", add="count"),
        lone_sum("f64", add="double"),
        lone_sum(dims="0"),
        lone_sum(groups="{{0,1,2,3,4},{5,6,7}}"),
        lone_sum(layout="{0,1}"),
        lone_sum(ids=False),
        module(
            f"""
            %a = f32[512,512] parameter(0)
            %b = f32[512,512] negate(%a)
            %s = f32[512,512] {all_reduce("%a", more=", control-predecessors={%b}")}
            ROOT %n = f32[512,512] add(%s, %b)
            """
        ),
        module(
            f"""
            %a = f32[512,512] parameter(0)
            %i = s32[] constant(0)
            %s = f32[512,512] {all_reduce("%a")}
            ROOT %n = f32[64,512] dynamic-slice(%s, %i, %i), dynamic_slice_sizes={{64,512}}
            """,
            result="f32[64,512]",
        ),
    ],
    ids=["largest", "integers", "double", "empty", "uneven", "columns first", "replicas", "ordered", "scattered"],
)  # fmt: skip
def test_which_stay(stays: Module) -> None:
    assert shaped(stays) is stays
    assert shaped(stays, TODAY) is stays


def test_nothing_changes_on_one_host() -> None:
    plain = lone_sum(dims="4096,512")
    assert shaped(plain, steep(8)) is plain
    assert shaped(plain, on(topology_named("today@1x8"), 8)) is plain


def gradients(dims: Sequence[int], width: int) -> Module:
    """Products in a row, each with a sum of its own that only the result reads, and written in the order of `dims`."""
    square = f"f32[{width},{width}]"
    chain = [
        f"%p{at} = {square} dot(%p{at - 1}, %p{at - 1}), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}"
        for at in range(1, len(dims) + 1)
    ]
    sums = [f"%g{at} = {square} {all_reduce(f'%p{at}', channel=at)}" for at in dims]
    names = ", ".join(f"%g{at}" for at in dims)
    result = "(" + ", ".join([square] * len(dims)) + ")"
    lines = [f"%p0 = {square} parameter(0)", *chain, *sums, f"ROOT %t = {result} tuple({names})"]
    return module("\n".join(lines), f"p0: {square}", result)


def test_sums_that_nothing_waits_for_travel_together_as_they_become_ready() -> None:
    assert buckets(shaped(gradients([3, 1, 4, 2], 64))) == [["p1", "p2", "p3", "p4"]]


def test_a_bucket_ends_at_32_mib() -> None:
    hlo = shaped(gradients([6, 5, 4, 3, 2, 1], 1664))  # 10.6 MiB each
    assert sorted(buckets(hlo)) == [["p1", "p2", "p3"], ["p4", "p5", "p6"]]
    assert [short(op.shape) for op in collectives(hlo) if op.opcode == "reduce-scatter"] == [
        "f32[2076672]"
    ] * 2


def test_every_sum_of_a_bucket_keeps_its_name_and_gets_its_part() -> None:
    plain = module(
        f"""
        %a = f32[3] parameter(0)
        %b = f32[2,2] parameter(1)
        %c = f32[] parameter(2)
        %s = f32[3] {all_reduce("%a", 1)}
        %t = f32[2,2] {all_reduce("%b", 2)}
        %u = f32[] {all_reduce("%c", 3)}
        ROOT %all = (f32[3], f32[2,2], f32[]) tuple(%s, %t, %u)
        """,
        "a: f32[3], b: f32[2,2], c: f32[]",
        "(f32[3], f32[2,2], f32[])",
    )
    ops = shaped(plain).entry.ops
    parts = [ops[ops[name].operands[0]] for name in ("s", "t", "u")]
    assert [part.slices for part in parts] == [((0, 3, 1),), ((3, 7, 1),), ((7, 8, 1),)]
    assert [short(ops[name].shape) for name in ("s", "t", "u")] == ["f32[3]", "f32[2,2]", "f32[]"]


def test_other_types_and_groups_do_not_travel_together() -> None:
    plain = module(
        f"""
        %a = f32[64] parameter(0)
        %b = s32[64] parameter(1)
        %s = f32[64] {all_reduce("%a", 1)}
        %t = s32[64] {all_reduce("%b", 2, add="count")}
        %u = f32[64] {all_reduce("%a", 3, groups="{{0,1,4,5},{2,3,6,7}}")}
        ROOT %all = (f32[64], s32[64], f32[64]) tuple(%s, %t, %u)
        """,
        "a: f32[64], b: s32[64]",
        "(f32[64], s32[64], f32[64])",
    )
    assert buckets(shaped(plain)) == [["a"], ["b"], ["a"]]


def test_statistics_travel_at_once_with_those_that_are_ready_then() -> None:
    """Mean and squares of a layer together; the next layer's wait for them, and its gradient waits for nobody."""
    product = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    plain = module(
        f"""
        %x = f32[64,64] parameter(0)
        %y = f32[64,64] dot(%x, %x), {product}
        %mean = f32[64,64] {all_reduce("%y", 1)}
        %squares = f32[64,64] multiply(%y, %y)
        %square = f32[64,64] {all_reduce("%squares", 2)}
        %h = f32[64,64] subtract(%mean, %square)
        %y2 = f32[64,64] dot(%h, %h), {product}
        %mean2 = f32[64,64] {all_reduce("%y2", 3)}
        %off = f32[64,64] subtract(%y2, %mean2)
        %var2 = f32[64,64] {all_reduce("%off", 4)}
        %y3 = f32[64,64] dot(%var2, %h), {product}
        %g = f32[64,64] {all_reduce("%y3", 5)}
        %loss = f32[64,64] {all_reduce("%y", 6)}
        ROOT %all = (f32[64,64], f32[64,64]) tuple(%g, %loss)
        """,
        "x: f32[64,64]",
        "(f32[64,64], f32[64,64])",
    )
    assert buckets(shaped(plain)) == [["y", "squares"], ["y2"], ["off"], ["y", "y3"]]


def test_order_beyond_what_is_read_counts_as_waiting() -> None:
    plain = module(
        f"""
        %a = f32[64] parameter(0)
        %k = f32[64] negate(%a)
        %s = f32[64] {all_reduce("%a", 1)}
        %l = f32[64] negate(%s)
        %m = f32[64] negate(%k), control-predecessors={{%l}}
        %t = f32[64] {all_reduce("%m", 2)}
        %w = f32[64] add(%l, %t)
        ROOT %u = f32[64] {all_reduce("%w", 3)}
        """,
        "a: f32[64]",
        "f32[64]",
    )
    hlo = shaped(plain)
    assert buckets(hlo) == [["a"], ["m"], ["w"]]
    assert (hlo.entry.ops["m"].operands, hlo.entry.ops["m"].predecessors) == (("k",), ("l",))


def several(second: str = "f32[64]", reader: str = "get-tuple-element(%t), index=1") -> Module:
    return module(
        f"""
        %a = f32[64] parameter(0)
        %b = {second} parameter(1)
        %t = (f32[64], {second}) {all_reduce("%a, %b")}
        %u = f32[64] get-tuple-element(%t), index=0
        %v = {second} {reader}
        ROOT %all = (f32[64], {second}) tuple(%u, %v)
        """,
        f"a: f32[64], b: {second}",
        f"(f32[64], {second})",
    )


def test_a_sum_of_several_arrays_is_taken_apart() -> None:
    hlo = shaped(several())
    assert buckets(hlo) == [["a", "b"]]
    assert "t" not in hlo.entry.ops


def test_what_is_left_of_several_arrays_is_summed_by_itself() -> None:
    hlo = shaped(several("f32[8,8]{0,1}"))
    assert buckets(hlo) == [["a"], ["b"]]
    assert hlo.entry.ops["v"].opcode == "all-reduce"
    assert str(hlo.entry.ops["v"].shape) == "f32[8,8]{0,1}"
    assert "t" not in hlo.entry.ops


def test_what_is_left_has_channels_in_the_order_of_the_text() -> None:
    """Every process writes the same, whatever the order of its sets."""
    count = 12
    pairs = [
        f"""%t{at} = (f32[64], f32[8,8]{{0,1}}) {all_reduce("%a, %b", at + 1)}
        %one{at} = f32[64] get-tuple-element(%t{at}), index=0
        %two{at} = f32[8,8]{{0,1}} get-tuple-element(%t{at}), index=1"""
        for at in range(count)
    ]
    names = [f"%{which}{at}" for at in range(count) for which in ("one", "two")]
    result = f"({', '.join(['f32[64], f32[8,8]'] * count)})"
    lines = ["%a = f32[64] parameter(0)", "%b = f32[8,8]{0,1} parameter(1)", *pairs]
    lines.append(f"ROOT %all = {result} tuple({', '.join(names)})")
    ops = shaped(module("\n".join(lines), "a: f32[64], b: f32[8,8]", result)).entry.ops
    channels = [ops[f"two{at}"].channel for at in range(count)]
    assert channels == sorted(channels)


def test_several_arrays_that_are_read_as_a_whole_stay() -> None:
    plain = module(
        f"%a = f32[64] parameter(0)\nROOT %t = (f32[64], f32[64]) {all_reduce('%a, %a')}",
        "a: f32[64]",
        "(f32[64], f32[64])",
    )
    assert shaped(plain) is plain


def test_readers_come_behind_the_last_of_a_bucket() -> None:
    plain = module(
        f"""
        %a = f32[64] parameter(0)
        %s = f32[64] {all_reduce("%a", 1)}
        %r = f32[64] negate(%s)
        %b = f32[64] exponential(%a)
        %t = f32[64] {all_reduce("%b", 2)}
        ROOT %all = (f32[64], f32[64]) tuple(%r, %t)
        """,
        "a: f32[64]",
        "(f32[64], f32[64])",
    )
    names = list(shaped(plain).entry.ops)
    assert names.index("b") < names.index("s.bucket1") < names.index("s") < names.index("r")


def test_names_and_channels_that_are_taken() -> None:
    plain = module(
        f"""
        %a = f32[64] parameter(0)
        %s.flat1 = f32[64] negate(%a)
        %s = f32[64] {all_reduce("%s.flat1", 17)}
        ROOT %r = f32[64] negate(%s)
        """,
        "a: f32[64]",
        "f32[64]",
    )
    hlo = shaped(plain)
    assert hlo.entry.ops["s.flat1"].opcode == "negate"
    assert hlo.entry.ops["s.flat2"].operands == ("s.flat1",)
    assert [op.channel for op in collectives(hlo)] == [18, 19, 20, 21]


def test_float16_between_hosts() -> None:
    ops = shaped(lone_sum(), wire=Wire.named("float16")).entry.ops
    assert "f16[2,32768]" in [short(op.shape) for op in ops.values()]


def test_groups_that_reach_other_hosts_alone() -> None:
    assert told(shaped(lone_sum(groups=ACROSS))) == [
        ("all-to-all", "u16[2,131072]", ACROSS),
        ("all-gather", "u16[262144]", ACROSS),
    ]


def test_on_a_cpu_parts_are_exchanged_and_added_in_the_order_of_the_group() -> None:
    hlo = shaped(lone_sum(dims="6,4"), backend=CPU, wire=None)
    assert told(hlo) == [
        ("all-to-all", "f32[6]", INSIDE),
        ("all-reduce", "f32[6]", ACROSS),
        ("all-gather", "f32[24]", INSIDE),
    ]
    ops = hlo.entry.ops
    (exchange, total, _) = collectives(hlo)
    slices = [ops[name].slices for name in exchange.operands]
    assert slices == [((low, low + 6, 1),) for low in (0, 6, 12, 18)]
    assert all(array.is_row_major for op in collectives(hlo) for array in op.result)
    order, last = [], ops[total.operands[0]]
    while last.opcode == "add":
        order.append(ops[last.operands[1]].index)
        last = ops[last.operands[0]]
    assert [*order, last.index] == [3, 2, 1, 0]


def test_on_a_cpu_bits_travel_in_tuples() -> None:
    hlo = shaped(lone_sum(), backend=CPU)
    kinds = [(op.opcode, len(op.operands)) for op in collectives(hlo)]
    assert kinds == [("all-to-all", 4), ("all-to-all", 2), ("all-gather", 1), ("all-gather", 1)]


def test_in_their_own_type_integers_go_in_phases_too() -> None:
    """Of gloo's sums, which pass a link twice as often as those in phases; NCCL's do not."""
    numbers = lone_sum("s32", add="count")
    phases = told(shaped(numbers, backend=CPU, wire=None))
    assert [kind for kind, *_ in phases] == ["all-to-all", "all-reduce", "all-gather"]
    large = lone_sum(dims="4096,512")
    assert shaped(large, TODAY, GPU, None) is large
    assert shaped(large, TODAY, CPU, None) is not large
