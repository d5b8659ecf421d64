"""A data-parallel step over a machine that is not here: as jax.jit compiles it, and as memplan.jit does."""

from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import AbstractMesh

from experiments.bench.cases import Case
from experiments.bench.results import Found, Row
from memplan import pipeline
from memplan.compilation.compiler import compile_program
from memplan.hardware.topology import topology_named
from memplan.parallel.step import data_parallel
from memplan.request import Request
from memplan.xla.replay import Replay, replay


def measure(case: Case) -> Found:
    """A row for each way; the batch of a device is that of the case's step."""
    step, (state, batch, *rest), donated = case.built()
    links = topology_named(case.facts["topology"])
    options, request = {"donate_argnums": donated}, Request(None, None, case.device, topology=links)
    single = pipeline.best(step, (state, batch, *rest), {}, options, Request(None, None, case.device))

    def stacked(leaf: Any) -> Any:
        """Of the global batch: so many times as long."""
        shape = tuple(leaf.shape)
        return jax.ShapeDtypeStruct((shape[0] * links.devices, *shape[1:]), leaf.dtype) if shape else leaf

    divided = data_parallel(step, AbstractMesh(tuple(links.sizes.values()), tuple(links.sizes)))
    args = state, jax.tree.map(stacked, batch), *rest
    program = pipeline.traced(divided, args, {}, options, request)
    plain = compile_program(program, request.target)
    narrow = Request(None, None, case.device, topology=links, between_hosts="bfloat16")
    replays = {
        "jax.jit": replay(plain.module, request.target.device, program.machine),
        **{
            name: pipeline.best(divided, args, {}, options, asked).planned.result.replay
            for name, asked in (("memplan.jit", request), ("memplan.jit, bfloat16", narrow))
        },
    }
    hosts = links.devices // links.axes[-1].size
    summed = sum(count * one.nbytes for one, count in replays["jax.jit"].collectives.items())
    return Found(list(rows(replays, 2 * summed * (hosts - 1) / hosts, single.step_s, links.devices)))


def rows(replays: dict[str, Replay], bound: float, single_s: float, devices: int) -> Iterator[Row]:
    """Figures of every way; `bound` is the least that all-reduces of what the step sums send from a host."""
    for way, found in replays.items():
        yield {
            "way": way, "bound_bytes": bound, "devices": devices, "step_s": found.step_s, "single_s": single_s,
            "sent_bytes": sum(count * one.outside_nbytes for one, count in found.collectives.items()),
            "collective_s": found.collective_s, "hidden_collective_s": found.hidden_collective_s,
            "efficiency": single_s / found.step_s, "jit_step_s": replays["jax.jit"].step_s,
        }  # fmt: skip
