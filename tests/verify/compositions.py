"""Text of small modules with collectives, and of compositions of collectives that are equal to one."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Groups = Sequence[Sequence[int]]
Dims = Sequence[int]

HEAD = "HloModule jit_step, input_output_alias={ {0}: (0, {}, may-alias) }"
REDUCERS = "\n\n".join(
    f"""%{name} (s: {dtype}[], t: {dtype}[]) -> {dtype}[] {{
  %s = {dtype}[] parameter(0)
  %t = {dtype}[] parameter(1)
  ROOT %u = {dtype}[] {opcode}(%s, %t)
}}"""
    for name, dtype, opcode in (
        ("add.f", "f32", "add"),
        ("max.f", "f32", "maximum"),
        ("mul.f", "f32", "multiply"),
        ("add.b", "bf16", "add"),
    )
)


def module(entry: Sequence[str], bodies: str = "", head: str = HEAD) -> str:
    lines = "\n".join(f"  {line}" for line in entry)
    return f"{head}\n\n{REDUCERS}\n\n{bodies}\n\nENTRY %main (a: f32[]) -> f32[] {{\n{lines}\n}}\n"


def listed(groups: Groups) -> str:
    return "{" + ",".join("{" + ",".join(map(str, group)) + "}" for group in groups) + "}"


def inside(hosts: int, devices: int) -> Groups:
    """One group for each host."""
    return [list(range(host * devices, (host + 1) * devices)) for host in range(hosts)]


def across(hosts: int, devices: int) -> Groups:
    """One group for each place in a host."""
    return [list(range(place, hosts * devices, devices)) for place in range(devices)]


def shape(dims: Dims, dtype: str = "f32") -> str:
    layout = "{" + ",".join(map(str, reversed(range(len(dims))))) + "}" if dims else ""
    return f"{dtype}[{','.join(map(str, dims))}]{layout}"


@dataclass
class Writer:
    """Lines of a computation, one instruction each, and channels that are not taken."""

    lines: list[str] = field(default_factory=list)
    channels: "itertools.count[int]" = field(default_factory=lambda: itertools.count(100))

    def put(self, name: str, dims: Dims, call: str, dtype: str = "f32") -> str:
        self.lines.append(f"%{name} = {shape(dims, dtype)} {call}")
        return name

    def talk(self, groups: Groups) -> str:
        return f"channel_id={next(self.channels)}, replica_groups={listed(groups)}, use_global_device_ids=true"

    # sums

    def all_reduce(self, name: str, given: str, dims: Dims, groups: Groups, add: str = "add.f") -> str:
        return self.put(name, dims, f"all-reduce(%{given}), {self.talk(groups)}, to_apply=%{add}")

    def bucket(self, sums: Sequence[tuple[str, str, Dims]], phases: Callable[[str, int], str], multiple: int) -> None:
        """Sums (name, operand, dimensions) as one, padded to a multiple."""
        first = sums[0][0]
        sizes = [math.prod(dims) for *_, dims in sums]
        flats = [
            self.put(f"{first}.flat{number}", [size], f"reshape(%{given})")
            for number, ((_, given, _), size) in enumerate(zip(sums, sizes, strict=True))
        ]
        total = sum(sizes)
        joined = flats[0]
        if len(flats) > 1:
            operands = ", ".join(f"%{flat}" for flat in flats)
            joined = self.put(f"{first}.joined", [total], f"concatenate({operands}), dimensions={{0}}")
        if rest := -total % multiple:
            zero = self.put(f"{first}.zero", [], "constant(0)")
            joined = self.put(f"{first}.padded", [total + rest], f"pad(%{joined}, %{zero}), padding=0_{rest}")
        whole = phases(joined, total + rest)
        start = 0
        for (name, _, dims), size in zip(sums, sizes, strict=True):
            part = self.put(f"{name}.part", [size], f"slice(%{whole}), slice={{[{start}:{start + size}]}}")
            self.put(name, dims, f"reshape(%{part})")
            start += size

    def scattered(self, given: str, size: int, levels: Sequence[Groups]) -> str:
        """Reduce-scatters inside all levels but the last, an all-reduce there, all-gathers back."""
        *inner, last = levels
        for number, groups in enumerate(inner):
            size //= len(groups[0])
            call = f"reduce-scatter(%{given}), {self.talk(groups)}, dimensions={{0}}, to_apply=%add.f"
            given = self.put(f"{given}.near{number}", [size], call)
        given = self.all_reduce(f"{given}.far", given, [size], last)
        for number, groups in reversed(list(enumerate(inner))):
            size *= len(groups[0])
            given = self.put(
                f"{given}.back{number}", [size], f"all-gather(%{given}), {self.talk(groups)}, dimensions={{0}}"
            )
        return given

    def twice(self, given: str, size: int, inner: Groups, outer: Groups) -> str:
        given = self.all_reduce(f"{given}.near", given, [size], inner)
        given = self.put(f"{given}.apart", [size], f"opt-barrier(%{given})")
        return self.all_reduce(f"{given}.far", given, [size], outer)

    def parts(self, given: str, dims: Dims, dtype: str) -> list[str]:
        """Slices along the first dimension."""
        rest = "".join(f", [0:{size}]" for size in dims[1:])
        return [
            self.put(f"{given}.row{row}", [1, *dims[1:]], f"slice(%{given}), slice={{[{row}:{row + 1}]{rest}}}", dtype)
            for row in range(dims[0])
        ]

    def tuple_exchange(self, given: Sequence[str], dims: Dims, dtype: str, groups: Groups) -> list[str]:
        name, one = f"{given[0]}.swap", shape(dims, dtype)
        operands = ", ".join(f"%{part}" for part in given)
        talk = f"channel_id={next(self.channels)}, replica_groups={listed(groups)}"
        self.lines.append(f"%{name} = ({', '.join([one] * len(given))}) all-to-all({operands}), {talk}")
        return [
            self.put(f"{name}.got{number}", dims, f"get-tuple-element(%{name}), index={number}", dtype)
            for number in range(len(given))
        ]

    def added_parts(self, given: str, size: int, inner: Groups) -> str:
        """A reduce-scatter by slices, an all-to-all of tuples and adds."""
        count = len(inner[0])
        length = size // count
        split = self.put(f"{given}.split", [count, length], f"reshape(%{given})")
        got = self.tuple_exchange(self.parts(split, [count, length], "f32"), [1, length], "f32", inner)
        total = got[0]
        for number, part in enumerate(got[1:]):
            total = self.put(f"{given}.plus{number}", [1, length], f"add(%{total}, %{part})")
        return self.put(f"{given}.piece", [length], f"reshape(%{total})")

    def sent(self, given: str, size: int, outer: Groups, tuples: bool = False) -> str:
        """A sum across hosts in bfloat16."""
        count = len(outer[0])
        length = size // count
        dims = [count, length]
        rows = self.put(f"{given}.rows", dims, f"reshape(%{given})")
        short = self.put(f"{given}.short", dims, f"convert(%{rows})", "bf16")
        bits = self.put(f"{given}.bits", dims, f"bitcast-convert(%{short})", "u16")
        if tuples:
            got = self.tuple_exchange(self.parts(bits, dims, "u16"), [1, length], "u16", outer)
            operands = ", ".join(f"%{part}" for part in got)
            swapped = self.put(f"{given}.swapped", dims, f"concatenate({operands}), dimensions={{0}}", "u16")
        else:
            talk = f"channel_id={next(self.channels)}, replica_groups={listed(outer)}"
            swapped = self.put(f"{given}.swapped", dims, f"all-to-all(%{bits}), {talk}, dimensions={{0}}", "u16")
        numbers = self.put(f"{given}.numbers", dims, f"bitcast-convert(%{swapped})", "bf16")
        wide = self.put(f"{given}.wide", dims, f"convert(%{numbers})")
        zero = self.put(f"{given}.none", [], "constant(0)")
        total = self.put(f"{given}.total", [length], f"reduce(%{wide}, %{zero}), dimensions={{0}}, to_apply=%add.f")
        again = self.put(f"{given}.again", [length], f"convert(%{total})", "bf16")
        code = self.put(f"{given}.code", [length], f"bitcast-convert(%{again})", "u16")
        all_ = self.put(f"{given}.all", [size], f"all-gather(%{code}), {self.talk(outer)}, dimensions={{0}}", "u16")
        back = self.put(f"{given}.back", [size], f"bitcast-convert(%{all_})", "bf16")
        return self.put(f"{given}.done", [size], f"convert(%{back})")

    def scattered_and_sent(self, given: str, size: int, inner: Groups, outer: Groups, tuples: bool = False) -> str:
        """In float32 inside hosts, in bfloat16 across them."""
        length = size // len(inner[0])
        if tuples:
            piece = self.added_parts(given, size, inner)
        else:
            call = f"reduce-scatter(%{given}), {self.talk(inner)}, dimensions={{0}}, to_apply=%add.f"
            piece = self.put(f"{given}.near", [length], call)
        done = self.sent(piece, length, outer, tuples)
        return self.put(f"{given}.end", [size], f"all-gather(%{done}), {self.talk(inner)}, dimensions={{0}}")

    # gathers and scatters

    def gather(self, name: str, given: str, dims: Dims, dim: int, inner: Groups, outer: Groups) -> str:
        """Across hosts, then inside them."""
        hosts, devices = len(outer[0]), len(inner[0])
        one = self.put(f"{name}.one", [1, *dims], f"reshape(%{given})")
        far = self.put(f"{name}.far", [hosts, *dims], f"all-gather(%{one}), {self.talk(outer)}, dimensions={{0}}")
        host = self.put(f"{name}.host", [1, hosts, *dims], f"reshape(%{far})")
        split = [devices, hosts, *dims]
        near = self.put(f"{name}.near", split, f"all-gather(%{host}), {self.talk(inner)}, dimensions={{0}}")
        order = [*range(2, 2 + dim), 1, 0, *range(2 + dim, len(split))]
        call = f"transpose(%{near}), dimensions={{{','.join(map(str, order))}}}"
        turned = self.put(f"{name}.turned", [split[one] for one in order], call)
        whole = [size * (hosts * devices if at == dim else 1) for at, size in enumerate(dims)]
        return self.put(name, whole, f"reshape(%{turned})")

    def scatter(self, name: str, given: str, dims: Dims, dim: int, inner: Groups, outer: Groups) -> str:
        """Inside hosts, then across them."""
        hosts, devices = len(outer[0]), len(inner[0])
        piece = [size // (hosts * devices if at == dim else 1) for at, size in enumerate(dims)]
        split = [*dims[:dim], hosts, devices, piece[dim], *dims[dim + 1 :]]
        order = [dim + 1, dim, *range(dim), *range(dim + 2, len(split))]
        parts = self.put(f"{name}.split", split, f"reshape(%{given})")
        call = f"transpose(%{parts}), dimensions={{{','.join(map(str, order))}}}"
        turned = self.put(f"{name}.turned", [split[one] for one in order], call)
        end = "dimensions={0}, to_apply=%add.f"
        near = self.put(f"{name}.near", [1, hosts, *piece], f"reduce-scatter(%{turned}), {self.talk(inner)}, {end}")
        host = self.put(f"{name}.host", [hosts, *piece], f"reshape(%{near})")
        far = self.put(f"{name}.far", [1, *piece], f"reduce-scatter(%{host}), {self.talk(outer)}, {end}")
        return self.put(name, piece, f"reshape(%{far})")
