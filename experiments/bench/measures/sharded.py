"""A sharded step on a described machine, within a share of its bytes or a policy's bytes."""

from experiments.bench.cases import Case
from experiments.bench.measures.planned import limit_of, measurement_of
from experiments.bench.results import Measurement
from memplan import pipeline
from memplan.compilation.outcome import Outcome
from memplan.hardware.topology import topology_named
from memplan.request import UNLIMITED, Request
from memplan.xla.collectives.cost import PERMUTE


def measure(case: Case) -> Measurement:
    """Bytes and seconds per device: plain, with a policy of `jax.checkpoint`, and planned."""
    step, args, donated = case.built()
    links, options = topology_named(case.facts["topology"]), {"donate_argnums": donated}
    plain = pipeline.best(
        step, args, {}, options, Request(UNLIMITED, device=case.device, topology=links)
    )
    row = {
        "plain_bytes": plain.device_bytes, "plain_step_s": plain.step_s,
        "plain_halo_bytes": _halo_bytes(plain),
    }  # fmt: skip
    limit = limit_of(case, plain.device_bytes)
    if "checkpoint" in case.facts:
        remat_step, remat_args = case.facts["checkpoint"]()
        checkpointed = pipeline.best(
            remat_step,
            remat_args,
            {},
            options,
            Request(UNLIMITED, device=case.device, topology=links),
        )
        row |= {
            "checkpoint_bytes": checkpointed.device_bytes,
            "checkpoint_step_s": checkpointed.step_s,
        }
        limit = checkpointed.device_bytes
    request = Request(limit, case.host_budget, case.device, topology=links)
    outcome = pipeline.best(step, args, {}, options, request)
    row |= {
        "budget_bytes": limit, "predicted_bytes": outcome.planned.predicted_bytes,
        "compiled_bytes": outcome.device_bytes, "host_bytes": outcome.host_bytes,
        "step_s": outcome.step_s,
        "slab_loops": sum(len(record.loops) for record in outcome.program.in_slabs),
        "halo_bytes": _halo_bytes(outcome),
        "collective_s": outcome.planned.result.replay.collective_s,
        "hidden_collective_s": outcome.planned.result.replay.hidden_collective_s,
    }  # fmt: skip
    return measurement_of(row, outcome)


def _halo_bytes(outcome: Outcome) -> int:
    """Bytes that an inner device sends by collective-permutes; for two devices, their sum."""
    sent = outcome.planned.result.replay.collectives.items()
    return sum(
        count * collective.nbytes for collective, count in sent if collective.kind == PERMUTE
    )
