"""A data-parallel step on a described machine, compiled by jax.jit and by memplan.jit."""

from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import AbstractMesh

from experiments.bench.cases import Case
from experiments.bench.results import Measurement, Row
from memplan import pipeline
from memplan.compilation.compiler import compile_program
from memplan.hardware.topology import topology_named
from memplan.parallel.step import data_parallel
from memplan.request import Request, traced
from memplan.xla.replay import Replay, replay


def measure(case: Case) -> Measurement:
    """A row for each method; the batch per device is that of the case's step."""
    step, (state, batch, *more_args), donated = case.built()
    links = topology_named(case.facts["topology"])
    options = {"donate_argnums": donated}
    request = Request("100%", None, case.device, topology=links)
    single = pipeline.best(
        step, (state, batch, *more_args), {}, options, Request("100%", None, case.device)
    )

    def stacked(leaf: Any) -> Any:
        """The shape in the global batch."""
        shape = tuple(leaf.shape)
        return (
            jax.ShapeDtypeStruct((shape[0] * links.devices, *shape[1:]), leaf.dtype)
            if shape
            else leaf
        )

    divided = data_parallel(step, AbstractMesh(tuple(links.sizes.values()), tuple(links.sizes)))
    args = state, jax.tree.map(stacked, batch), *more_args
    program = traced(divided, args, {}, options, request)
    plain = compile_program(program, request.target)
    narrow = Request("100%", None, case.device, topology=links, between_hosts="bfloat16")
    replays = {
        "jax.jit": replay(plain.module, request.target.device, program.machine),
        **{
            name: pipeline.best(divided, args, {}, options, variant).planned.result.replay
            for name, variant in (("memplan.jit", request), ("memplan.jit, bfloat16", narrow))
        },
    }
    hosts = links.devices // links.axes[-1].size
    summed = sum(
        count * collective.nbytes for collective, count in replays["jax.jit"].collectives.items()
    )
    return Measurement(
        list(rows(replays, 2 * summed * (hosts - 1) / hosts, single.step_s, links.devices))
    )


def rows(replays: dict[str, Replay], bound: float, single_s: float, devices: int) -> Iterator[Row]:
    """The figures of every method; `bound`: fewest bytes that all-reduces send from a host."""
    for method, result in replays.items():
        yield {
            "way": method, "bound_bytes": bound, "devices": devices, "step_s": result.step_s,
            "single_s": single_s,
            "sent_bytes": sum(
                count * collective.outside_nbytes
                for collective, count in result.collectives.items()
            ),
            "collective_s": result.collective_s, "hidden_collective_s": result.hidden_collective_s,
            "efficiency": single_s / result.step_s, "jit_step_s": replays["jax.jit"].step_s,
        }  # fmt: skip
