"""How a step scales: replayed on more and more devices, from what XLA compiles for a whole machine that is not here."""

import math
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import AbstractMesh

from experiments.bench.cases import Case
from experiments.bench.results import Found, Row
from memplan import pipeline
from memplan.hardware.topology import Topology, topology_named
from memplan.parallel.step import data_parallel
from memplan.pipeline import Outcome, Request
from memplan.xla.replay import replay

LARGEST = 4096  # devices


def measure(case: Case) -> Found:
    """A row for each number of devices; the step is compiled once for one device, and once divided for all."""
    step, args, donated = case.built()
    links, statistics = topology_named(case.facts["topology"]), case.facts["statistics"]
    options, request = {"donate_argnums": donated}, Request(case.budget, None, case.device)
    single = pipeline.best(step, args, {}, options, request)
    state, batch, *rest = args

    def stacked(leaf: Any) -> Any:
        """Of the global batch: so many times as long."""
        shape = tuple(leaf.shape)
        return jax.ShapeDtypeStruct((shape[0] * links.devices, *shape[1:]), leaf.dtype) if shape else leaf

    mesh = AbstractMesh(tuple(links.sizes.values()), tuple(links.sizes))
    divided = data_parallel(step, mesh, topology=links, device=case.device, statistics=statistics)
    whole = pipeline.best(divided, (state, jax.tree.map(stacked, batch), *rest), {}, options, request)
    if not (single.fits and whole.fits):
        return Found([], "does not fit", f"{case.budget}")
    return Found(list(rows(single, whole, links)))


def rows(single: Outcome, whole: Outcome, links: Topology) -> Iterator[Row]:
    """Efficiency: seconds alone, of the undivided or the divided step, whichever is faster, over seconds on many."""
    module, device = whole.planned.result.module, whole.target.device
    best_s = min(single.step_s, replay(module, device, links.resized(dict.fromkeys(links.sizes, 1)), links).step_s)
    for sizes in shapes(links):
        found = replay(module, device, links.resized(sizes), links)
        yield {
            "compiled_shape": "x".join(map(str, links.sizes.values())), "compiled_bytes": whole.device_bytes,
            "single_s": single.step_s, "devices": math.prod(sizes.values()), "step_s": found.step_s,
            "collective_s": found.collective_s, "hidden_collective_s": found.hidden_collective_s,
            "efficiency": best_s / found.step_s,
        }  # fmt: skip


def shapes(links: Topology) -> Iterator[dict[str, int]]:
    """One host, then twice as many each time, up to 4,096 devices."""
    outermost, *inner = links.axes
    hosts, devices = 1, math.prod(axis.size for axis in inner)
    while hosts * devices <= LARGEST:
        yield {**links.sizes, outermost.name: hosts}
        hosts *= 2
