"""The levels of a machine of many devices: how many nodes each has, and the links between them.

Bandwidths follow from the vendors' figures and one allowance for the efficiency of a link.
Latencies are assumptions, named as such; write your own figures to a file (`Topology.save`) if they
matter.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from memplan import io
from memplan.errors import TopologyError
from memplan.hardware.catalog import LINKS
from memplan.hardware.measured import is_path
from memplan.io import read_json, write_atomic

FORMAT = 1

_ENDLESS = 1e300  # larger figures are refused: no machine's figure comes near


@dataclass(frozen=True, slots=True)
class Axis:
    """One level of a machine: nodes of a kind, and the links between them.

    Raises:
      TopologyError: a field has a wrong type or value.
    """

    name: str  # of the mesh axis, for example `host` or `device`
    size: int  # nodes of this level in one node of the level around it
    latency_s: float  # seconds from one node to the next, whatever the bytes
    bandwidth: float  # bytes/s in each direction that one link achieves
    # True: all devices of a node share one link at this level, as those of a host share its network
    # card; False: each device has its own, as GPUs have NVLink
    shared: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            raise TopologyError(
                f"{self.name!r} is not the name of an axis. Give it text, such as 'host' or "
                "'device'."
            )
        if not _is_number(self.size, whole=True) or self.size < 1:
            raise TopologyError(
                f"the axis {self.name!r} has size {self.size!r}. A size is a whole number, at "
                "least 1."
            )
        if not _is_number(self.latency_s) or self.latency_s < 0:
            raise TopologyError(
                f"the axis {self.name!r} has a latency of {self.latency_s!r}. A latency is in "
                "seconds, 0 or more."
            )
        if not _is_number(self.bandwidth) or self.bandwidth <= 0:
            raise TopologyError(
                f"the axis {self.name!r} has a bandwidth of {self.bandwidth!r}. "
                "A bandwidth is in bytes per second, above 0 and finite."
            )
        if not isinstance(self.shared, bool):
            raise TopologyError(
                f"'shared' of the axis {self.name!r} is {self.shared!r}. It is True or False."
            )


def _is_number(value: object, whole: bool = False) -> bool:
    kinds = int if whole else (int, float)
    return isinstance(value, kinds) and not isinstance(value, bool) and -_ENDLESS < value < _ENDLESS


@dataclass(frozen=True)
class Topology:
    """A machine, one axis per level.

    Raises:
      TopologyError: it has no axis, or two of the same name.
    """

    name: str  # for example `ddl`; `ddl@16x4` with other sizes
    description: str  # the exact products
    axes: tuple[Axis, ...]  # outermost first
    sources: tuple[str, ...]  # where the figures come from

    def __post_init__(self) -> None:
        if not self.axes:
            raise TopologyError(
                f"the topology {self.name!r} has no axes. Give it one per level, outermost first."
            )
        names = [axis.name for axis in self.axes]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise TopologyError(
                f"the topology {self.name!r} has several axes {twice[0]!r}. Give each its own name."
            )

    @property
    def devices(self) -> int:
        """Number of devices."""
        return math.prod(axis.size for axis in self.axes)

    @property
    def sizes(self) -> dict[str, int]:
        """Size by axis, outermost first."""
        return {axis.name: axis.size for axis in self.axes}

    def axis(self, name: str) -> Axis:
        """The axis called `name` (TopologyError: there is none)."""
        return self.axes[self._level(name)]

    def inside(self, name: str) -> tuple[Axis, ...]:
        """The axes of one node of `name`, outermost first."""
        return self.axes[self._level(name) + 1 :]

    def _level(self, name: str) -> int:
        names = list(self.sizes)
        if name not in names:
            raise TopologyError(
                f"the topology {self.name!r} has no axis {name!r}.{_hint(name, names)} Its axes: "
                f"{', '.join(names)}."
            )
        return names.index(name)

    def resized(self, sizes: Mapping[str, int]) -> Topology:
        """The same links between other numbers of nodes; axes that `sizes` leaves out stay.

        Raises:
          TopologyError: no such axis, or not a size.
        """
        for name in sizes:
            self.axis(name)
        axes = tuple(replace(axis, size=sizes.get(axis.name, axis.size)) for axis in self.axes)
        if axes == self.axes:
            return self
        shape = "x".join(str(axis.size) for axis in axes)
        return replace(self, name=f"{self.name.partition('@')[0]}@{shape}", axes=axes)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON to `path`; the file appears whole or not at all (OSError)."""
        write_atomic(path, self.to_json() + "\n")

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **io.encode(self)}, indent=1)


def load(path: str | os.PathLike[str]) -> Topology:
    """Read a saved topology.

    Raises:
      TopologyError: there is no such file, or it is not a complete topology. The error says what is
        wrong.
    """
    try:
        return io.decode(Topology, read_json(path, FORMAT), complete=True, exact=True)
    except OSError as error:
        raise TopologyError(
            f"the topology {os.fspath(path)!r} cannot be read: {error.strerror or error}. "
            "A topology is the path of a file that `Topology.save` wrote, or one of "
            f"{', '.join(TOPOLOGIES)}."
        ) from error
    except ValueError as error:
        raise TopologyError(
            f"{os.fspath(path)!r} is not a complete topology file ({error!s:.300}). It may be "
            "truncated or from another program; save the topology again."
        ) from error


# The share of a link's nominal bandwidth that it achieves, as in `memplan.hardware.catalog`, here
# for links between devices. NCCL's own model takes the same 0.8 of NVLink 4: 360 of 450 GB/s
# (nvlinkBws in its tuner).
_LINK_EFFICIENCY = 0.8

# Seconds of a step between two nodes. Over NVLink, so that eight H100s sum 8 to 256 KB in 22 us,
# six steps and a launch: NCCL was measured to take 21 to 24. Over the network assumed, as its tuner
# assumes it for a step of a ring (hwLatencies, ring, protocol Simple).
_NVLINK_LATENCY_S = 2e-6
_NETWORK_LATENCY_S = 14e-6
_LATENCIES = (
    "Latency over NVLink from 21 to 24 us of NCCL's small sums over eight H100; over the network "
    "assumed, as NCCL's tuner assumes it for one step of a ring with its protocol Simple "
    "(https://github.com/NVIDIA/nccl, src/graph/tuning.cc)"
)


def _nvlink(size: int, bricks: int, brick: float) -> Axis:
    """Devices of a host, each with `bricks` to its neighbour or switch, of `brick` bytes/s per
    direction.
    """
    return Axis("device", size, _NVLINK_LATENCY_S, _LINK_EFFICIENCY * bricks * brick, shared=False)


def _network(size: int, gigabits: float) -> Axis:
    """Hosts with one network link each."""
    return Axis("host", size, _NETWORK_LATENCY_S, _LINK_EFFICIENCY * gigabits * 1e9 / 8)


_DDL = Topology(
    name="ddl",
    description=(
        "IBM Power System S822LC hosts with four NVIDIA Tesla P100, NVLink 1.0, InfiniBand EDR"
    ),
    axes=(_network(64, 100), _nvlink(4, 2, 20e9)),
    sources=(
        "Cho et al., PowerAI DDL (https://arxiv.org/abs/1708.02188): 64 S822LC hosts, 256 P100, "
        "100 Gb/s InfiniBand",
        "InfiniBand Architecture Specification, EDR 4x: 100 Gb/s, 12.5 GB/s per direction; one "
        "link for a whole host, "
        f"taken at {_LINK_EFFICIENCY}",
        "NVIDIA Tesla P100 whitepaper "
        "(https://images.nvidia.com/content/pdf/tesla/whitepaper/pascal-architecture-"
        "whitepaper.pdf): four NVLink 1.0 bricks of 20 GB/s per direction. In an S822LC two go to "
        "the other GPU of the "
        "socket and two to the processor, so a ring of four has 40 GB/s at every step; between the "
        "sockets it crosses "
        f"POWER8's bus of 38.4 GB/s, counted as the same. Taken at {_LINK_EFFICIENCY}",
        _LATENCIES,
    ),
)

_TODAY = Topology(
    name="today",
    description=(
        "hosts with eight NVIDIA H100 or H200 behind NVSwitch, NVLink 4, "
        "one 400 Gb/s network link per host"
    ),
    axes=(_network(32, 400), _nvlink(8, 18, 25e9)),
    sources=(
        "NVIDIA H100 Tensor Core GPU datasheet (https://www.nvidia.com/en-us/data-center/h100/): "
        "NVLink 900 GB/s in "
        "both directions together, 18 bricks of 25 GB/s per direction; taken at "
        f"{_LINK_EFFICIENCY}",
        "NVIDIA ConnectX-7 datasheet: 400 Gb/s, 50 GB/s per direction. Conservative: one link for "
        "a whole host, where "
        "NVIDIA's own systems have one per GPU (for those set 'shared' of the axis host to false); "
        "taken at "
        f"{_LINK_EFFICIENCY}",
        _LATENCIES,
    ),
)

_LOCAL = Topology(
    name="local",
    description="CPU devices of one process, processes of one machine as hosts",
    axes=(
        Axis("host", 1, 50e-6, 2.5e9),
        Axis("device", 4, 10e-6, LINKS["local-memory"].bandwidth, shared=False),
    ),
    sources=(
        "Between processes assumed: TCP over loopback, 2.5 GB/s, 50 us to wake the other process",
        f"Between devices: {LINKS['local-memory'].source} Here 10 us, as several threads have to "
        "meet",
    ),
)

_TOPOLOGIES = (_DDL, _TODAY, _LOCAL)
TOPOLOGIES: Mapping[str, Topology] = MappingProxyType({topo.name: topo for topo in _TOPOLOGIES})


def topology_named(name_or_path: str) -> Topology:
    """The topology of this name, in any case, or in the file at this path.

    `name@16x4` has other sizes.

    Raises:
      TopologyError: there is no such topology, the sizes do not fit it, or the file is not one. The
        error lists the known topologies.
    """
    if is_path(name_or_path):
        return load(name_or_path)
    name, at, shape = name_or_path.strip().lower().partition("@")
    if name not in TOPOLOGIES:
        raise TopologyError(
            f"Unknown topology {name_or_path!r}.{_hint(name, TOPOLOGIES)} Known: "
            f"{', '.join(TOPOLOGIES)}. "
            "Write a topology as 'ddl', as 'ddl@16x4' for 16 hosts of 4 devices, or as the path of "
            "a .json file from `Topology.save`."
        )
    topology = TOPOLOGIES[name]
    return topology.resized(_shape(topology, shape, name_or_path)) if at else topology


def _shape(topology: Topology, shape: str, whole: str) -> dict[str, int]:
    is_shape = re.fullmatch(r"[0-9]{1,9}(x[0-9]{1,9})*", shape)
    if not is_shape or shape.count("x") + 1 != len(topology.axes):
        example = "x".join(str(axis.size) for axis in topology.axes)
        raise TopologyError(
            f"{shape!r} (in {whole!r}) is not a shape of {topology.name!r}. Write a size for "
            f"each of its axes ({', '.join(topology.sizes)}), as in '{topology.name}@{example}'."
        )
    return dict(zip(topology.sizes, map(int, shape.split("x")), strict=True))


def _hint(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, [*names], n=3, cutoff=0.5)
    return f" Did you mean {' or '.join(close)}?" if close else ""
