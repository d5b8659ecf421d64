"""Runs every case at reduced size on the CPU, in the planned order, against the unmodified step, for three steps.

    python -m experiments.budgets.numbers [--only NAME ...] [--out FILE] [--force]

The plan is made for the case's own GPU. Its budget is the case's share of what the reduced step needs in segments with
nothing recomputed or moved: of the unmodified step's compiled peak, most of which is floor at such sizes, these shares
cannot be reached. A small step leaves less time for every byte that is copied, so the link gets 50 times the bandwidth
and no latency. A plan that changes anything is required. Where the share has no plan that fits, the nearest that has
one is taken, else the plan that misses it: its numbers count all the same. Each program (unmodified, cut into segments
in three ways, planned) is fed its own state. Every value is rounded to its own type, in all of them (`AS_TYPED`).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax

from experiments.budgets.cases import Case, Program
from experiments.budgets.run import OPTIONS, RESULTS, environment, selected, write
from memplan.planning import devices
from memplan.planning.graph import Graph
from memplan.planning.plan import Plan
from memplan.planning.planners.protocol import Problem, Proposal
from memplan.planning.planners.registry import planner_named
from memplan.planning.simulate import Simulator
from memplan.program import compat, extract, trace
from memplan.program.executor import compile_stages
from memplan.running import AS_TYPED, chopped_plans, segmented_plan
from memplan.verify.plan import Account, judge
from memplan.verify.program import Gate, compare, roundings

STEPS = 3

Flat = Callable[[Sequence[Any]], list[Any]]


@dataclass(frozen=True)
class Reduced:
    """What the cases of one program share: its graph, flat arguments, and the unmodified step's outputs of every step.

    Attributes:
      states: how many of the first arguments, and outputs, are the training state.
    """

    program: trace.Program
    graph: Graph
    leaves: list[Any]
    states: int
    outputs: list[list[Any]]


@lru_cache(maxsize=1)
def reduced(known: Program) -> Reduced:
    """Built, traced and run unmodified."""
    step, args = known.reduced(concrete=True)
    program = trace.trace(step, args, {}, OPTIONS)
    leaves, states = jax.tree.leaves(args), len(jax.tree.leaves(args[0]))
    unmodified = jax.jit(compat.jaxpr_as_fun(program.jaxpr), compiler_options=AS_TYPED)
    outputs = trained(lambda inputs: unmodified(*inputs), leaves, states)
    return Reduced(program, extract.extract(program), leaves, states, outputs)


def measure(case: Case) -> dict[str, Any]:
    """Plan, run and compare one case; the figures as a JSON object."""
    start = time.perf_counter()
    known = reduced(case.program)
    graph = known.graph
    kept, percent, proposal, account = plan(graph, case)
    cut = segmented_plan(graph, kept * percent // 100, case.device)
    runs = (
        trained(staged(known.program, graph, one), known.leaves, known.states)
        for one in (cut, proposal.plan, *chopped_plans(graph, case.device))
    )
    coarsest = roundings(graph, known.program.jaxpr.jaxpr.outvars)
    gates = [compare(*outputs, coarsest=coarsest) for outputs in zip(known.outputs, *runs, strict=True)]
    return {
        "case": case.name, "device": case.device, "percent": percent, "kept_bytes": kept,
        "fits": proposal.fits, "predicted_bytes": proposal.timeline.peak_nbytes,
        "segments": len(proposal.timeline.moments), "outputs": len(gates[0].leaves),
        "recomputed_ops": sum(account.recomputed.values()), "offloaded_bytes": account.offloaded_nbytes,
        "recomputed_kernels": sum(n for op, n in account.recomputed.items() if graph.ops[op].fusion == "kernel"),
        "passes": all(gate.passes for gate in gates), "steps": list(map(row, gates)),
        "wall_s": time.perf_counter() - start,
    }  # fmt: skip


def plan(graph: Graph, case: Case) -> tuple[int, int, Proposal, Account]:
    """Bytes in segments with nothing changed, the share of them that was planned for, the plan and what it does."""
    device, planner = devices.named(case.device), planner_named(None)
    device = replace(device, link=replace(device.link, latency_s=0.0, bandwidth=50 * device.link.bandwidth))
    whole = segmented_plan(graph, 2 * graph.resident_nbytes, case.device)
    kept = Simulator(graph, device).run(whole).peak_nbytes
    found: tuple[int, int, Proposal, Account] | None = None
    for percent in range(case.percent, 100, 5):
        proposal = planner.propose(Problem(graph, device, kept * percent // 100, 2 * device.memory_bytes))
        account = judge(proposal.plan, graph)
        if not (account.recomputed or account.offloaded_nbytes):
            continue
        found = found or (kept, percent, proposal, account)
        if proposal.fits:
            return kept, percent, proposal, account
    assert found, f"{case.name}: no plan that changes anything"
    return found


def staged(program: trace.Program, graph: Graph, plan: Plan) -> Flat:
    """A plan on the CPU, segment by segment; compiled once, fed copies since it consumes what is donated."""
    stages = compile_stages(program, graph, plan, AS_TYPED)
    return lambda leaves: stages([leaf.copy() for leaf in leaves])


def trained(run: Flat, leaves: Sequence[Any], states: int) -> list[list[Any]]:
    """The outputs of every step; the first `states` of them are the next step's first inputs."""
    inputs, outputs = list(leaves), []
    for _ in range(STEPS):
        outputs.append(list(run(inputs)))
        inputs = [*outputs[-1][:states], *leaves[states:]]
    return outputs


def row(gate: Gate) -> dict[str, Any]:
    """The output that is nearest to, or furthest beyond, its tolerance, and the largest errors of all."""
    worst = gate.leaves[gate.worst]
    return {
        "passes": gate.passes,
        "beyond": sum(leaf.planned > leaf.tolerance for leaf in gate.leaves),
        "worst_output": gate.worst,
        "recompilation": worst.recompilation,
        "planned": worst.planned,
        "tolerance": worst.tolerance,
        "largest_recompilation": max(leaf.recompilation for leaf in gate.leaves),
        "largest_planned": max(leaf.planned for leaf in gate.leaves),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--force", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS.parent / "numbers.json")
    args = parser.parse_args()
    found = json.loads(args.out.read_text()) if args.out.exists() else {"cases": {}}
    for case in selected(args.only):
        if case.name in found["cases"] and not args.force:
            continue
        found["cases"][case.name] = one = measure(case)
        write(args.out, {"environment": environment(), "cases": found["cases"]})
        last, verdict = one["steps"][-1], "passes" if one["passes"] else "FAILS"
        print(
            f"{case.name}: {verdict} at {one['percent']} %, {one['recomputed_ops']} again, {one['offloaded_bytes']} B "
            f"moved; after {STEPS} steps {last['planned']:.1e} of {last['tolerance']:.1e}; {one['wall_s']:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
