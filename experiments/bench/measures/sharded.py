"""A sharded step over a machine that is not here, within a share of its bytes or what `jax.checkpoint` makes of it."""

from experiments.bench.cases import Case
from experiments.bench.measures.planned import found_of, limit_of
from experiments.bench.results import Found
from memplan import pipeline
from memplan.compilation.outcome import Outcome
from memplan.hardware.topology import topology_named
from memplan.request import UNLIMITED, Request
from memplan.xla.collectives.cost import PERMUTE


def measure(case: Case) -> Found:
    """One device's bytes and seconds: of the step as it is, of the policy of `jax.checkpoint` if any, and planned."""
    step, args, donated = case.built()
    links, options = topology_named(case.facts["topology"]), {"donate_argnums": donated}
    plain = pipeline.best(step, args, {}, options, Request(UNLIMITED, device=case.device, topology=links))
    row = {
        "plain_bytes": plain.device_bytes, "plain_step_s": plain.step_s, "plain_halo_bytes": _halo_bytes(plain),
    }  # fmt: skip
    limit = limit_of(case, plain.device_bytes)
    if "checkpoint" in case.facts:
        other, other_args = case.facts["checkpoint"]()
        found = pipeline.best(other, other_args, {}, options, Request(UNLIMITED, device=case.device, topology=links))
        row |= {"checkpoint_bytes": found.device_bytes, "checkpoint_step_s": found.step_s}
        limit = found.device_bytes
    request = Request(limit, case.host_budget, case.device, topology=links)
    found = pipeline.best(step, args, {}, options, request)
    row |= {
        "budget_bytes": limit, "predicted_bytes": found.planned.predicted_bytes, "compiled_bytes": found.device_bytes,
        "host_bytes": found.host_bytes, "step_s": found.step_s,
        "slab_loops": sum(len(one.loops) for one in found.program.in_slabs), "halo_bytes": _halo_bytes(found),
        "collective_s": found.planned.result.replay.collective_s,
        "hidden_collective_s": found.planned.result.replay.hidden_collective_s,
    }  # fmt: skip
    return found_of(row, found)


def _halo_bytes(found: Outcome) -> int:
    """What a device between others sends by collective-permutes; of two devices, what both send."""
    sent = found.planned.result.replay.collectives.items()
    return sum(count * one.nbytes for one, count in sent if one.kind == PERMUTE)
