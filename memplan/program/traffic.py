"""Scheduled optimized HLO -> bytes moved and seconds of one step: a roofline per kernel, three streams.

The same account for every executable, whoever decided what it recomputes and offloads. A kernel reads its operands
and writes its results once; of a sliced operand it reads the slice, of a buffer updated in place it writes the update.

Left out: launches, caches, elementwise arithmetic, the conditions of loops. A loop is one block: its body is replayed
with idle streams and taken times its trip count.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from memplan.planning.cost import copy_seconds, kernel_seconds
from memplan.planning.devices import Device
from memplan.program.hlo import HOST_SPACE

_OP = re.compile(r"^\s*(?P<root>ROOT )?%(?P<name>[\w.\-]+) = (?P<result>.*?) (?P<opcode>[a-z][\w\-]*)\((?P<rest>.*)$")
_BODY = re.compile(r"^(?P<entry>ENTRY )?%(?P<name>[\w.\-]+) .*\{$")
_ARRAY = re.compile(r"(?P<dtype>[a-z]\w*)\[(?P<dims>[\d,<=]*)\](?P<layout>\{[^}]*\})?")
_NAME = re.compile(r"%([\w.\-]+)")
_BODIES = re.compile(r"\b(?:calls|to_apply|body|(?:true|false)_computation|branch_computations)=(\{[^}]*\}|%\S+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CONTRACTED = re.compile(r'\blhs_contracting_dim(?:ension)?s"?[=:][{\[]([^}\]]*)')
_FILTER_LABELS = re.compile(r"\bdim_labels=\w+_(\w+)->")
_DILATION = re.compile(r"\blhs_dilate=([\dx]+)")
_BATCH_GROUPS = re.compile(r"\bbatch_group_count=(\d+)")

_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "opt-barrier", "after-all", "add-dependency",
         "partition-id", "replica-id"}  # fmt: skip
_SLICES = {"slice", "dynamic-slice", "gather"}
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # written in place: opcode -> position of what is written
_NUMPY = {"bf": "bfloat", "f": "float", "s": "int", "u": "uint", "c": "complex"}


@dataclass(frozen=True)
class Traffic:
    """What one step moves and how long that takes at the device's peak rates.

    Attributes:
      kernel_nbytes: bytes of device memory that kernels read and write.
      flops: of matrix products and convolutions.
      kernels: how many run.
      convolutions: how many of them are convolutions or matrix products.
      compute_s: sum of the kernels' roofline seconds.
      copied_out_nbytes, copied_in_nbytes: bytes to the host and from it.
      copy_s: seconds that the busier direction of the link is busy.
      hidden_copy_s: of these, seconds during which kernels run.
      step_s: seconds from the first kernel to the end of everything.
    """

    kernel_nbytes: int
    flops: float
    kernels: int
    convolutions: int
    compute_s: float
    copied_out_nbytes: int
    copied_in_nbytes: int
    copy_s: float
    hidden_copy_s: float
    step_s: float


def traffic(hlo_text: str, device: Device) -> Traffic:
    """Replay the entry computation of `compiled.as_text()` on `device`.

    Raises:
      ValueError: the text is not a scheduled HLO module.
    """
    replay = _Replay(_read_module(hlo_text), device).run("ENTRY")
    sums = replay.sums()
    ways = ((sums[f"{way}_s"], sums[f"{way}_hidden_s"]) for way in ("out", "in"))
    copy_s, hidden_s = max(ways, key=lambda way: (round(way[0], 12), -way[1]))  # as busy: the less hidden one
    return Traffic(
        kernel_nbytes=int(sums["nbytes"]),
        flops=sums["flops"],
        kernels=int(sums["kernels"]),
        convolutions=int(sums["convolutions"]),
        compute_s=sums["compute_s"],
        copied_out_nbytes=int(sums["out_nbytes"]),
        copied_in_nbytes=int(sums["in_nbytes"]),
        copy_s=copy_s,
        hidden_copy_s=hidden_s,
        step_s=replay.end_s,
    )


@dataclass(frozen=True, slots=True)
class _Array:
    dtype: str  # HLO's name: f32, bf16, pred
    dims: tuple[int, ...]
    on_host: bool

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    @property
    def nbytes(self) -> int:
        digits = re.match(r"[a-z]+(\d+)", self.dtype)
        bits = int(digits[1]) if digits else 8 * (self.dtype == "pred")  # tokens have none
        return -(-self.size * bits // 8)

    @property
    def numpy_name(self) -> str:
        prefix = re.match(r"[a-z]+", self.dtype)
        return _NUMPY.get(prefix[0], prefix[0]) + self.dtype[prefix.end() :] if prefix else self.dtype


@dataclass(frozen=True, slots=True)
class _Op:
    """An instruction; `result` has a tuple's leaves in order, `attributes` is what follows the operands."""

    name: str
    opcode: str
    result: tuple[_Array, ...]
    operands: tuple[str, ...]
    attributes: str
    root: bool

    @property
    def bodies(self) -> list[str]:
        return [name for found in _BODIES.findall(self.attributes) for name in _NAME.findall(found)]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.result)


@dataclass(frozen=True)
class _Body:
    """A computation: instruction name -> instruction, in schedule order; one kernel where it is fused."""

    ops: dict[str, _Op]
    fused: bool = False

    @cached_property
    def uses(self) -> Mapping[str, list[tuple[_Op, int]]]:
        found: dict[str, list[tuple[_Op, int]]] = {name: [] for name in self.ops}
        for op in self.ops.values():
            for position, name in enumerate(op.operands):
                found[name].append((op, position))
        return found

    @cached_property
    def parameters(self) -> dict[int, _Op]:
        return {int(op.attributes): op for op in self.ops.values() if op.opcode == "parameter"}

    @cached_property
    def outputs(self) -> tuple[_Op, ...]:
        """The instructions that make the results."""
        root = next(op for op in self.ops.values() if op.root)
        names = root.operands if root.opcode == "tuple" else (root.name,)
        return tuple(map(self.behind_bitcasts, names))

    def behind_bitcasts(self, name: str) -> _Op:
        op = self.ops[name]
        return self.behind_bitcasts(op.operands[0]) if op.opcode == "bitcast" else op

    def updates_in_place(self, op: _Op) -> bool:
        """As a kernel of its own always; in a fusion, where a parameter is updated and returned."""
        if op.opcode not in _UPDATES or not self.fused:
            return op.opcode in _UPDATES
        return self.behind_bitcasts(op.operands[0]).opcode == "parameter" and op in self.outputs

    def update_of(self, op: _Op) -> _Array:
        return self.ops[op.operands[_UPDATES[op.opcode]]].result[0]


_Module = Mapping[str, _Body]


def _read_module(text: str) -> _Module:
    """Computations by name, the entry's also as "ENTRY"."""
    bodies: dict[str, _Body] = {}
    current: dict[str, _Op] = {}
    for line in text.splitlines():
        if header := _BODY.match(line):
            current = {}
            bodies["ENTRY" if header["entry"] else header["name"]] = _Body(current)
        elif found := _OP.match(line):
            current[found["name"]] = _read_op(found)
    if "ENTRY" not in bodies or "is_scheduled=true" not in text:
        raise ValueError("This is not scheduled HLO; pass the text of `jax.jit(step).lower(...).compile().as_text()`.")
    return bodies


def _read_op(found: re.Match[str]) -> _Op:
    operands, _, attributes = re.sub(r"\)(, |$)", "\0", found["rest"], count=1).partition("\0")
    if found["opcode"] in ("parameter", "constant"):
        operands, attributes = "", operands
    arrays = tuple(map(_read_array, _ARRAY.finditer(found["result"])))
    names = tuple(_NAME.findall(operands))
    return _Op(found["name"], found["opcode"], arrays, names, attributes, bool(found["root"]))


def _read_array(found: re.Match[str]) -> _Array:
    dims = tuple(int(side) for side in found["dims"].replace("<=", "").split(",") if side)
    return _Array(found["dtype"], dims, f"S({HOST_SPACE})" in (found["layout"] or ""))


def _read_nbytes(module: _Module, body: _Body, op: _Op, position: int) -> int:
    """Bytes of its operand at `position` that an instruction reads; it stands in a fusion or is a kernel."""
    operand = body.ops[op.operands[position]]
    if op.opcode == "bitcast" and not op.root:
        return _read_by_all(module, body, op)
    if position == 0 and body.updates_in_place(op):
        return body.update_of(op).nbytes if op.opcode == "scatter" else 0  # adds to what is there
    if position == 0 and op.opcode in _SLICES:
        return min(operand.nbytes, op.nbytes)
    if called := _fused(module, op):
        return _read_by_all(module, called, called.parameters[position])
    return operand.nbytes


def _read_by_all(module: _Module, body: _Body, value: _Op) -> int:
    reads = (_read_nbytes(module, body, op, position) for op, position in body.uses[value.name])
    return value.nbytes if value.root else min(value.nbytes, sum(reads))


def _fused(module: _Module, op: _Op) -> _Body | None:
    return replace(module[op.bodies[0]], fused=True) if op.opcode in ("fusion", "async") else None


def _written(module: _Module, body: _Body, op: _Op) -> list[_Array]:
    """What a kernel writes, without the workspace of library calls."""
    called = _fused(module, op)
    where, makers = (called, called.outputs) if called else (body, (op,))
    arrays: list[_Array] = []
    for maker in makers:
        in_place = where.updates_in_place(maker)
        arrays += [replace(where.update_of(maker), on_host=maker.result[0].on_host)] if in_place else maker.result
    library = op.opcode == "custom-call" or "kind=kCustom" in op.attributes
    has_workspace = library and len(arrays) > 1 and arrays[-1].dtype in ("s8", "u8") and len(arrays[-1].dims) == 1
    return arrays[:-1] if has_workspace else arrays


def _moved(module: _Module, body: _Body, op: _Op) -> Counter[str]:
    """Bytes of device memory ("device"), from host memory ("in") and to it ("out")."""
    moved: Counter[str] = Counter()
    for name in dict.fromkeys(op.operands):
        reads = [_read_nbytes(module, body, op, i) for i, operand in enumerate(op.operands) if operand == name]
        nbytes = min(body.ops[name].nbytes, sum(reads))
        moved["in" if any(array.on_host for array in body.ops[name].result) else "device"] += nbytes
    for array in _written(module, body, op):
        moved["out" if array.on_host else "device"] += array.nbytes
    return moved


def _matrix_work(module: _Module, body: _Body, op: _Op) -> tuple[float, str]:
    """FLOPs of matrix products and convolutions in a kernel, and the numpy name of their operands' type."""
    if called := _fused(module, op):
        parts = [_matrix_work(module, called, inner) for inner in called.ops.values()]
        return sum(flops for flops, _ in parts), next((dtype for _, dtype in parts if dtype), "")
    target = re.search(r'custom_call_target="([^"]*)', op.attributes)
    kind = target[1] if target else op.opcode
    rule = next((rule for pattern, rule in _FLOPS.items() if kind.startswith(pattern)), None)
    if rule is None:
        return 0.0, ""
    left, right = (body.ops[name].result[0] for name in op.operands[:2])
    return rule(left, right, op.result[0], op.attributes), left.numpy_name


def _dot_flops(left: _Array, right: _Array, result: _Array, attributes: str) -> float:
    found = _CONTRACTED.search(attributes)
    axes = [int(axis) for axis in re.findall(r"\d+", found[1])] if found else []
    return 2.0 * result.size * math.prod(left.dims[axis] for axis in axes)


def _conv_flops(image: _Array, kernel: _Array, result: _Array, attributes: str) -> float:
    """`result` is the output of the forward convolution; products with the zeros of a dilated input are not counted."""
    labels, dilation, groups = (p.search(attributes) for p in (_FILTER_LABELS, _DILATION, _BATCH_GROUPS))
    features = kernel.dims[labels[1].index("o")] if labels else 1
    skipped = math.prod(map(int, dilation[1].split("x"))) if dilation else 1
    return 2.0 * result.size * kernel.size / features / skipped / (int(groups[1]) if groups else 1)


_FLOPS: dict[str, Callable[[_Array, _Array, _Array, str], float]] = {
    "dot": _dot_flops,
    "__cublas$": _dot_flops,
    "convolution": _conv_flops,
    "__cudnn$convBackwardInput": lambda dy, kernel, dx, attributes: _conv_flops(dx, kernel, dy, attributes),
    "__cudnn$convBackwardFilter": lambda x, dy, kernel, attributes: _conv_flops(x, kernel, dy, attributes),
    "__cudnn$conv": _conv_flops,
}


class _Replay:
    """The compute stream and one copy stream in each direction, advanced instruction by instruction."""

    def __init__(self, module: _Module, device: Device) -> None:
        self._module, self._device = module, device
        self._clock = 0.0  # compute stream, seconds
        self._stalls: list[tuple[float, float]] = []  # of the compute stream
        self._copies: dict[str, list[tuple[float, float]]] = {"out": [], "in": []}
        self._ready: dict[str, float] = {}  # copies under way -> when they end
        self._sums: dict[str, float] = defaultdict(float)

    def run(self, name: str) -> _Replay:
        body = self._module[name]
        for op in body.ops.values():
            self._step(body, op)
        return self

    @property
    def end_s(self) -> float:
        return max(self._clock, *(copies[-1][1] for copies in self._copies.values() if copies), 0.0)

    def sums(self) -> dict[str, float]:
        """Totals, the copies' seconds included."""
        sums = self._sums.copy()
        for way, copies in self._copies.items():
            for start, end in copies:
                sums[f"{way}_s"] += end - start
                sums[f"{way}_hidden_s"] += max(0.0, self._computed_s(end) - self._computed_s(start))
        return sums

    def _computed_s(self, time: float) -> float:
        """Seconds until `time` during which the compute stream was busy."""
        return min(time, self._clock) - sum(min(time, end) - start for start, end in self._stalls if start < time)

    def _step(self, body: _Body, op: _Op) -> None:
        if op.opcode in _FREE or '"AllocateBuffer"' in op.attributes:
            return
        if op.opcode == "while":
            trips = _TRIPS.search(op.attributes)
            self._block(self._alone(op.bodies[0]), int(trips[1]) if trips else 1)
        elif op.opcode == "conditional":
            self._block(max(map(self._alone, op.bodies), key=lambda branch: branch.end_s), 1)
        elif op.opcode == "call":
            self.run(op.bodies[0])
        elif op.opcode.endswith("-start"):
            self._start(body, op)
        elif op.opcode.endswith("-done"):
            self._wait(self._ready.pop(op.operands[0], self._clock))
        else:
            self._kernel(body, op)

    def _alone(self, name: str) -> _Replay:
        return _Replay(self._module, self._device).run(name)

    def _block(self, part: _Replay, times: int) -> None:
        for key, value in part.sums().items():
            self._sums[key] += times * value
        self._clock += times * part.end_s

    def _start(self, body: _Body, op: _Op) -> None:
        done, _ = body.uses[op.name][0]
        wrapped = replace(op, opcode=op.opcode.removesuffix("-start"), result=done.result)
        moved = _moved(self._module, body, wrapped) if wrapped.opcode != "call" else Counter()
        if moved["in"] or moved["out"]:
            self._ready[op.name] = self._copy(moved)
        else:
            self._step(body, wrapped)

    def _copy(self, moved: Counter[str]) -> float:
        """When a copy ends that may start now."""
        end = self._clock
        for way in self._copies:
            if moved[way]:
                free = self._copies[way][-1][1] if self._copies[way] else 0.0
                start = max(self._clock, free)
                end = start + copy_seconds(moved[way], self._device)
                self._copies[way].append((start, end))
                self._sums[f"{way}_nbytes"] += moved[way]
        return end

    def _wait(self, until: float) -> None:
        if until > self._clock:
            self._stalls.append((self._clock, until))
            self._clock = until

    def _kernel(self, body: _Body, op: _Op) -> None:
        """What touches host memory is a copy that everything waits for."""
        moved = _moved(self._module, body, op)
        if moved["in"] or moved["out"]:
            self._wait(self._copy(moved))
            return
        flops, dtype = _matrix_work(self._module, body, op)
        seconds = kernel_seconds(flops, dtype, moved["device"], self._device)
        self._clock += seconds
        self._sums["nbytes"] += moved["device"]
        self._sums["flops"] += flops
        self._sums["kernels"] += 1
        self._sums["convolutions"] += flops > 0
        self._sums["compute_s"] += seconds
