"""What a collective takes on the links of a machine: bytes and seconds."""

import functools
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from memplan.hardware.collectives import LAUNCH_S, all_reduce_seconds, reduce_scatter_seconds
from memplan.hardware.machine import Groups, Machine
from memplan.xla.collectives.groups import replica_groups, source_target_pairs
from memplan.xla.module import NAME, Module, without_metadata

REDUCE, SCATTER, GATHER, EXCHANGE = "all-reduce", "reduce-scatter", "all-gather", "all-to-all"
PERMUTE, BROADCAST = "collective-permute", "collective-broadcast"
COLLECTIVES = (REDUCE, SCATTER, GATHER, EXCHANGE, PERMUTE, BROADCAST)


def is_collective(opcode: str) -> bool:
    """Is it one, or the start of one?"""
    return opcode.removesuffix("-start") in (*COLLECTIVES, "ragged-all-to-all")


@dataclass(frozen=True)
class Collective:
    """One collective of a program.

    Attributes:
      kind: HLO's opcode.
      axes: levels of the machine that it crosses, outermost first.
      nbytes: bytes of the whole on one device: the input of a reduce-scatter, the output of an all-gather.
      outside_nbytes: bytes that the busiest host sends to others, by rings that pass hosts one after another.
      inside_nbytes: bytes that the busiest device sends to others of its host.
      seconds: on idle links.
    """

    kind: str
    axes: tuple[str, ...]
    nbytes: int
    outside_nbytes: float = 0.0
    inside_nbytes: float = 0.0
    seconds: float = 0.0


def collective(machine: Machine, opcode: str, attributes: str, operand_nbytes: int, result_nbytes: int) -> Collective:
    """The facts of a collective with operands and results of these bytes on each device.

    Raises:
      UnsupportedProgramError: its groups are in a notation that memplan does not know.
    """
    kind = opcode.removesuffix("-start").removeprefix("ragged-")
    if kind == PERMUTE:
        return _permute(machine, source_target_pairs(attributes), operand_nbytes)
    groups = replica_groups(attributes, len(machine.devices))
    return over_groups(machine, kind, groups, max(operand_nbytes, result_nbytes))


def collective_sequence(module: Module) -> str:
    """The collectives of a scheduled module in their order: what every process has to send in the same one."""
    found = (op for op in module.instructions.values() if is_collective(op.opcode))
    told = (NAME.sub("", without_metadata(op.attributes).partition(", backend_config=")[0]) for op in found)
    return "\n".join(told)


@functools.lru_cache(maxsize=4096)  # a module has the same few, many times
def over_groups(machine: Machine, kind: str, groups: Groups, nbytes: int) -> Collective:
    """A collective over these groups; `nbytes` as `Collective` has them."""
    links = machine.links(groups)
    axes = tuple(axis.name for axis in links.axes if axis.size > 1)
    if not axes:
        return Collective(kind, axes, nbytes)
    outside, inside = _sent(machine, kind, groups, nbytes)
    if kind == EXCHANGE:  # each sends a part to each, whatever the order
        seconds = LAUNCH_S + max(
            axis.latency_s + out / axis.bandwidth
            for axis, out in zip(machine.topology.axes, _exchanged(machine, groups, nbytes), strict=True)
        )
    else:
        take = all_reduce_seconds if kind == REDUCE else reduce_scatter_seconds  # the others send the same amount
        seconds = take(links, axes, nbytes)
    return Collective(kind, axes, nbytes, outside, inside, seconds)


def _sent(machine: Machine, kind: str, groups: Groups, nbytes: int) -> tuple[float, float]:
    """Bytes that the busiest host sends to others, and the busiest device within its host."""
    hosts = machine.hosts()
    outside: dict[tuple[int, ...], float] = defaultdict(float)
    inside = 0.0
    twice = 2 if kind == REDUCE else 1
    for group in groups:
        count, by_host = len(group), Counter(hosts[one] for one in group)
        if len(by_host) > 1:
            for host, members in by_host.items():
                passes = members * (count - members) if kind == EXCHANGE else count - 1
                outside[host] += twice * nbytes * passes / count
        if max(by_host.values()) > 1:
            most = max(by_host.values()) - 1 if kind == EXCHANGE else count - 1
            inside = max(inside, twice * nbytes * most / count)
    return max(outside.values(), default=0.0), inside


def _exchanged(machine: Machine, groups: Groups, nbytes: int) -> Sequence[float]:
    """For each level: bytes of an all-to-all that pass its busiest link."""
    found = []
    for level, axis in enumerate(machine.topology.axes):
        sent: dict[object, float] = defaultdict(float)
        for group in groups:
            nodes = Counter(machine.coordinates[one][: level + 1] for one in group)
            around = Counter(machine.coordinates[one][:level] for one in group)
            for one in group:
                node = machine.coordinates[one][: level + 1]
                others = around[node[:-1]] - nodes[node]
                sent[node if axis.shared else one] += nbytes * others / len(group)
        found.append(max(sent.values(), default=0.0))
    return found


@functools.lru_cache(maxsize=1024)
def _permute(machine: Machine, pairs: tuple[tuple[int, int], ...], nbytes: int) -> Collective:
    """Each pair's message passes the links of the outermost level at which the two differ."""
    hosts = machine.hosts()
    sent: list[Counter[object]] = [Counter() for _ in machine.topology.axes]
    for source, target in pairs:
        places = machine.coordinates[source], machine.coordinates[target]
        for level, axis in enumerate(machine.topology.axes):
            if places[0][level] != places[1][level]:
                sent[level][places[0][: level + 1] if axis.shared else source] += nbytes
                break
    busy = {axis: max(counts.values()) for axis, counts in zip(machine.topology.axes, sent, strict=True) if counts}
    outside = Counter(hosts[a] for a, b in pairs if hosts[a] != hosts[b])
    inside = any(a != b and hosts[a] == hosts[b] for a, b in pairs)
    return Collective(
        PERMUTE,
        tuple(axis.name for axis in busy),
        nbytes,
        nbytes * max(outside.values(), default=0),
        float(nbytes * inside),
        LAUNCH_S + max((axis.latency_s + out / axis.bandwidth for axis, out in busy.items()), default=0.0),
    )
