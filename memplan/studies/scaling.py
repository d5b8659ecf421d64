"""A step on more and more devices: compiled once for a whole machine that is not here, replayed on fewer and more."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh

from memplan import pipeline
from memplan.errors import MemplanError
from memplan.hardware.overheads import SOURCES, Overheads
from memplan.hardware.topology import Topology, topology_named
from memplan.outcome.summary import versions
from memplan.parallel.step import data_parallel
from memplan.pipeline import Notify, Outcome, Request
from memplan.report.scaling import Assumed, Count, Point, Scaling
from memplan.units import Size
from memplan.xla.replay import Replay, replay_on

LARGEST = 4096

ASSUMPTIONS = (
    "simulated: each kernel takes its roofline over roofline_share, on one device as on many; the slower kernels are, "
    "the better collectives hide",
    "one device is slowest throughout a step, and all the others wait for it; which one may change from step to step",
    "collectives take latency and bandwidth of the links in the topology, one after another, no other job on the links",
    "the batch of a device stays the same; checkpoints and failures cost nothing",
    "the schedule is XLA's for the compiled number of devices; for other numbers its collectives take other times",
)


@dataclass(frozen=True)
class CompiledStep:
    """A step compiled for one device, and divided for all; what it takes under other assumptions is quick to ask.

    Attributes:
      links: the machine that it is divided for.
      single: the step of one device; whole: the divided one.
      statistics: of the batch.
    """

    links: Topology
    single: Outcome
    whole: Outcome
    statistics: str

    def scaling(self, overheads: Overheads, notify: Notify = lambda stage, share: None) -> Scaling:
        """From one device to 4,096."""
        links, whole = self.links, self.whole
        (alone,) = self._replays(self.single, [dict.fromkeys(links.sizes, 1)], overheads)
        points: list[Point] = []
        for sizes, found in zip(shapes(links), self._replays(whole, shapes(links), overheads), strict=True):
            notify(f"replayed on {math.prod(sizes.values())} devices", None)
            best_s = min(alone.step_s, points[0].step_s if points else found.step_s)
            points.append(_point(sizes, found, best_s, overheads))
        return Scaling(
            device=whole.target.device.name,
            topology=f"{links.name}: {links.description}",
            compiled_shape="x".join(map(str, links.sizes.values())),
            device_bytes=whole.device_bytes,
            budget_bytes=whole.limits.device_bytes,
            planner=whole.plan.planner if whole.plan is not None else "none",
            unexpected=whole.unexpected_collectives,
            single_s=alone.step_s,
            collectives=_counts(whole.planned.result.replay),
            assumed=_assumed(overheads),
            assumptions=(*ASSUMPTIONS, *_limits(links), *links.sources, f"statistics of the batch: {self.statistics}"),
            points=tuple(points),
            versions=versions(),
        )

    def _replays(self, planned: Outcome, sizes: Sequence[dict[str, int]], overheads: Overheads) -> Iterator[Replay]:
        links = map(self.links.resized, sizes)
        return replay_on(planned.planned.result.module, planned.target.device, self.links, links, overheads)


def simulate(
    step: Callable[..., Any],
    args: Sequence[Any],
    topology: str | Topology,
    device: str,
    *,
    overheads: Overheads | None = None,
    notify: Notify = lambda stage, share: None,
    **limits: Any,
) -> Scaling:
    """Simulate a step from one device to 4,096.

    Args:
      overheads: stragglers, launches and what shares the links; None for the defaults of `Overheads`.
      step, args, topology, device, limits: see `compile_step`.

    Raises:
      MemplanError: see `compile_step`.
    """
    found = compile_step(step, args, topology, device, notify=notify, **limits)
    return found.scaling(overheads or Overheads(), notify)


def compile_step(
    step: Callable[..., Any],
    args: Sequence[Any],
    topology: str | Topology,
    device: str,
    *,
    budget: Size = None,
    donate_argnums: Any = (),
    statistics: str = "global",
    notify: Notify = lambda stage, share: None,
) -> CompiledStep:
    """Compile a step for one device, and divided for a machine: as it is where that fits, else as it is planned.

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
    whole = pipeline.run(divided, _global_arguments(args, links.devices), {}, options, request, notify)
    if not whole.target.is_gpu:
        raise MemplanError(f"{device} is no GPU that XLA compiles whole programs for; name one (memplan devices).")
    return CompiledStep(links, single, whole, statistics)


def shapes(links: Topology) -> list[dict[str, int]]:
    """One device, the inner axes filled, then the outermost doubled up to 4,096 devices.

    An axis of one node stays at one: what was compiled for it sends nothing along it.
    """
    found = []
    sizes = dict.fromkeys(links.sizes, 1)
    for name in reversed(links.sizes):
        outermost = name == links.axes[0].name and links.sizes[name] > 1
        limit = LARGEST // math.prod(sizes.values()) if outermost else links.sizes[name]
        size = 1
        while size <= limit:
            if {**sizes, name: size} not in found:
                found.append({**sizes, name: size})
            size *= 2
        sizes[name] = limit
    return found


def _limits(links: Topology) -> tuple[str, ...]:
    """Why there are no more points along some axes."""
    alone = ", ".join(axis.name for axis in links.axes if axis.size == 1)
    return (f"compiled for one node of the axis {alone}: nothing is known of what several would send",) if alone else ()


def _counts(found: Replay) -> tuple[Count, ...]:
    counted: Counter[str] = Counter()
    for one, times in found.collectives.items():
        counted[str(one)] += times
    return tuple(Count(name, times) for name, times in sorted(counted.items()))


def _point(sizes: dict[str, int], found: Replay, alone_s: float, overheads: Overheads) -> Point:
    devices = math.prod(sizes.values())
    return Point(
        shape="x".join(map(str, sizes.values())),
        devices=devices,
        step_s=found.step_s,
        compute_s=found.compute_s,
        collective_s=found.collective_s,
        hidden_collective_s=found.hidden_collective_s,
        slowest=overheads.slowest(devices),
        efficiency=alone_s / found.step_s,
    )


def _assumed(overheads: Overheads) -> tuple[Assumed, ...]:
    """Every overhead with the reason for it: its source, or that it was given."""
    usual = Overheads()
    return tuple(
        Assumed(name, float(value), SOURCES[name] if value == getattr(usual, name) else "given")
        for name, value in dataclasses.asdict(overheads).items()
    )


def _global_arguments(args: Sequence[Any], devices: int) -> tuple[Any, ...]:
    """The arguments at the global batch: the leaves of the second, so many times as long."""

    def stacked(leaf: Any) -> Any:
        shape = tuple(leaf.shape)
        return jax.ShapeDtypeStruct((shape[0] * devices, *shape[1:]), leaf.dtype) if shape else leaf

    state, batch, *rest = args
    return (state, jax.tree.map(stacked, batch), *rest)
