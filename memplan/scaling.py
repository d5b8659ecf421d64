"""A step on more and more devices: compiled once for a whole machine that is not here, replayed on fewer and more."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh

from memplan import pipeline
from memplan.errors import MemplanError
from memplan.parallel.step import data_parallel
from memplan.pipeline import Request
from memplan.planning.budget import Size
from memplan.planning.topology import Topology, topology_named
from memplan.program.traffic import Traffic, replayed
from memplan.refining import Notify
from memplan.report.scaling import Count, Level, Links, Point, Scaling, Topologies
from memplan.summary import versions

LARGEST = 4096

ASSUMPTIONS = (
    "simulated: kernels take their roofline (peak rates, no launches), on one device as on many",
    "collectives take latency and bandwidth of the links in the topology, one after another, nothing else on the links",
    "the batch of a device stays the same; data loading, stragglers and checkpoints cost nothing",
    "the schedule is XLA's for the compiled number of devices; for other numbers its collectives take other times",
)


def simulate(
    step: Callable[..., Any],
    args: Sequence[Any],
    topology: str | Topology,
    device: str,
    *,
    budget: Size = None,
    donate_argnums: Any = (),
    statistics: str = "global",
    notify: Notify = lambda stage, share: None,
) -> Scaling:
    """Simulate a step from one device to 4,096.

    Args:
      step: of one device; args: shapes of one device's arguments, the batch second.
      topology: the machine that the step is compiled for; device: one of its devices, by name.
      budget, donate_argnums: as for `memplan.jit`; statistics: as for `memplan.parallel.data_parallel`.

    Raises:
      MemplanError: nothing to communicate, or no GPU.
    """
    links = topology_named(topology) if isinstance(topology, str) else topology
    request, options = Request(budget, None, device), {"donate_argnums": donate_argnums}
    mesh = AbstractMesh(tuple(links.sizes.values()), tuple(links.sizes))
    divided = data_parallel(step, mesh, topology=links, device=device, statistics=statistics)
    notify("planning for one device", None)
    single = pipeline.run(step, args, {}, options, request, notify)
    notify(f"planning for {links.devices} devices", None)
    whole = pipeline.run(divided, _global(args, links.devices), {}, options, request, notify)
    executable = whole.chosen.executable
    if executable is None or whole.chosen.traffic is None:
        raise MemplanError(f"{device} is no GPU that XLA compiles whole programs for; name one (memplan devices).")
    single_s = single.chosen.step_s or 0.0
    counted: Counter[str] = Counter()
    for one, times in whole.chosen.traffic.collectives.items():
        counted[str(one)] += times
    points: list[Point] = []
    for sizes in shapes(links):
        notify(f"replaying on {math.prod(sizes.values())} devices", None)
        found = replayed(executable.text, whole.target.device, links, links.resized(sizes))
        points.append(_point(sizes, found, min(single_s, points[0].step_s if points else found.step_s)))
    return Scaling(
        device=device,
        topology=f"{links.name}: {links.description}",
        compiled_shape="x".join(map(str, links.sizes.values())),
        device_bytes=whole.chosen.device_bytes,
        budget_bytes=whole.report.budget_bytes,
        planner=whole.report.planner,
        unexpected=whole.chosen.strange,
        single_s=single_s,
        collectives=tuple(Count(name, times) for name, times in sorted(counted.items())),
        assumptions=(*ASSUMPTIONS, *links.sources, f"statistics of the batch: {statistics}"),
        points=tuple(points),
        versions=versions(),
    )


def shapes(links: Topology) -> list[dict[str, int]]:
    """One device, the inner axes filled, then the outermost doubled up to 4,096 devices."""
    found = []
    sizes = dict.fromkeys(links.sizes, 1)
    for name in reversed(links.sizes):
        outermost = name == links.axes[0].name
        limit = LARGEST // math.prod(sizes.values()) if outermost else links.sizes[name]
        size = 1
        while size <= limit:
            if {**sizes, name: size} not in found:
                found.append({**sizes, name: size})
            size *= 2
        sizes[name] = limit
    return found


def _point(sizes: dict[str, int], found: Traffic, alone_s: float) -> Point:
    shape, devices = "x".join(map(str, sizes.values())), math.prod(sizes.values())
    busy, hidden = found.collective_s, found.hidden_collective_s
    return Point(shape, devices, found.step_s, found.compute_s, busy, hidden, alone_s / found.step_s)


def _global(args: Sequence[Any], devices: int) -> tuple[Any, ...]:
    """The arguments at the global batch: the leaves of the second, so many times as long."""

    def longer(leaf: Any) -> Any:
        shape = tuple(leaf.shape)
        return jax.ShapeDtypeStruct((shape[0] * devices, *shape[1:]), leaf.dtype) if shape else leaf

    state, batch, *rest = args
    return (state, jax.tree.map(longer, batch), *rest)


def told(topologies: Sequence[Topology]) -> Topologies:
    """Topologies as a report."""
    return Topologies(
        tuple(
            Links(
                known.name,
                known.description,
                tuple(Level(a.name, a.size, a.latency_s, a.bandwidth, a.shared) for a in known.axes),
                known.sources,
            )
            for known in topologies
        )
    )
