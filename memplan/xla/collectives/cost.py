"""What a collective takes on the links of a machine: bytes and seconds."""

import functools
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from memplan.hardware.collectives import LAUNCH_S, all_reduce_seconds, reduce_scatter_seconds
from memplan.hardware.machine import Groups, Machine
from memplan.xla.module import Instruction, Module

REDUCE = "all-reduce"
SCATTER = "reduce-scatter"
GATHER = "all-gather"
EXCHANGE = "all-to-all"
PERMUTE = "collective-permute"
BROADCAST = "collective-broadcast"
COLLECTIVES = (REDUCE, SCATTER, GATHER, EXCHANGE, PERMUTE, BROADCAST)


def is_collective(opcode: str) -> bool:
    """Is it a collective, or the start of one?"""
    return opcode.removesuffix("-start") in (*COLLECTIVES, "ragged-all-to-all")


@dataclass(frozen=True)
class Collective:
    """One collective of a program."""

    kind: str  # HLO's opcode
    axes: tuple[str, ...]  # levels of the machine that it crosses, outermost first
    # of the whole on one device: the input of a reduce-scatter, the output of an all-gather
    nbytes: int
    # that the busiest host sends to others, by rings that pass hosts one after another
    outside_nbytes: float = 0.0
    inside_nbytes: float = 0.0  # that the busiest device sends to others of its host
    seconds: float = 0.0  # on idle links


def collective(machine: Machine, op: Instruction, operand_nbytes: int) -> Collective:
    """The cost of a collective.

    Args:
      op: the collective; of an asynchronous one, its start with the shape of its end.
      operand_nbytes: bytes of its operands on each device.

    Raises:
      UnsupportedProgramError: its groups are in a notation that memplan does not know.
    """
    kind = op.opcode.removesuffix("-start").removeprefix("ragged-")
    if kind == PERMUTE:
        return _permute(machine, op.source_target_pairs, operand_nbytes)
    groups = op.groups(len(machine.devices))
    return over_groups(machine, kind, groups, max(operand_nbytes, op.nbytes))


def collective_sequence(module: Module) -> str:
    """The collectives of a scheduled module, which every process has to send in the same order."""
    ops = (op for op in module.instructions.values() if is_collective(op.opcode))
    return "\n".join(str(op.statement) for op in ops)


@functools.lru_cache(maxsize=4096)  # a module has few different collectives, many times
def over_groups(machine: Machine, kind: str, groups: Groups, nbytes: int) -> Collective:
    """A collective over these groups; `nbytes` as `Collective` has them."""
    links = machine.links(groups)
    axes = tuple(axis.name for axis in links.axes if axis.size > 1)
    if not axes:
        return Collective(kind, axes, nbytes)
    outside_nbytes, inside_nbytes = _sent_nbytes(machine, kind, groups, nbytes)
    if kind == EXCHANGE:  # each device sends a part to each, in whatever order
        sent = zip(machine.topology.axes, _exchanged_nbytes(machine, groups, nbytes), strict=True)
        link_s = max(axis.latency_s + level_nbytes / axis.bandwidth for axis, level_nbytes in sent)
        seconds = LAUNCH_S + link_s
    elif kind == REDUCE:
        seconds = all_reduce_seconds(links, axes, nbytes)
    else:  # all other kinds send the same amount
        seconds = reduce_scatter_seconds(links, axes, nbytes)
    return Collective(kind, axes, nbytes, outside_nbytes, inside_nbytes, seconds)


def _sent_nbytes(
    machine: Machine,
    kind: str,
    groups: Groups,
    nbytes: int,
) -> tuple[float, float]:
    """Bytes that the busiest host sends to others, and the busiest device within its host."""
    hosts = machine.hosts()
    outside: dict[tuple[int, ...], float] = defaultdict(float)
    inside = 0.0
    rounds = 2 if kind == REDUCE else 1
    for group in groups:
        count = len(group)
        members_of = Counter(hosts[member] for member in group)
        if len(members_of) > 1:
            for host, members in members_of.items():
                messages = members * (count - members) if kind == EXCHANGE else count - 1
                outside[host] += rounds * nbytes * messages / count
        largest = max(members_of.values())
        if largest > 1:
            messages = largest - 1 if kind == EXCHANGE else count - 1
            inside = max(inside, rounds * nbytes * messages / count)
    return max(outside.values(), default=0.0), inside


def _exchanged_nbytes(machine: Machine, groups: Groups, nbytes: int) -> Sequence[float]:
    """For each level: bytes of an all-to-all that pass its busiest link."""
    busiest: list[float] = []
    for level, axis in enumerate(machine.topology.axes):
        sent: dict[object, float] = defaultdict(float)
        for group in groups:
            in_node = Counter(machine.coordinates[member][: level + 1] for member in group)
            in_parent = Counter(machine.coordinates[member][:level] for member in group)
            for member in group:
                node = machine.coordinates[member][: level + 1]
                receivers = in_parent[node[:-1]] - in_node[node]
                sent[node if axis.shared else member] += nbytes * receivers / len(group)
        busiest.append(max(sent.values(), default=0.0))
    return busiest


@functools.lru_cache(maxsize=1024)
def _permute(machine: Machine, pairs: tuple[tuple[int, int], ...], nbytes: int) -> Collective:
    """Each pair's message passes the links of the outermost level at which the two differ."""
    hosts = machine.hosts()
    sent: list[Counter[object]] = [Counter() for _ in machine.topology.axes]
    for source, target in pairs:
        source_nodes = machine.coordinates[source]
        target_nodes = machine.coordinates[target]
        for level, axis in enumerate(machine.topology.axes):
            if source_nodes[level] != target_nodes[level]:
                sent[level][source_nodes[: level + 1] if axis.shared else source] += nbytes
                break
    levels = zip(machine.topology.axes, sent, strict=True)
    busiest = {axis: max(counts.values()) for axis, counts in levels if counts}
    outside = Counter(hosts[source] for source, target in pairs if hosts[source] != hosts[target])
    inside = any(source != target and hosts[source] == hosts[target] for source, target in pairs)
    levels_s = (axis.latency_s + link / axis.bandwidth for axis, link in busiest.items())
    return Collective(
        PERMUTE,
        tuple(axis.name for axis in busiest),
        nbytes,
        nbytes * max(outside.values(), default=0),
        float(nbytes * inside),
        LAUNCH_S + max(levels_s, default=0.0),
    )
