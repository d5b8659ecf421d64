"""What the tests of steps run on the stand-in, each function in a process of its own.

Each returns how many `programs` ran, how many `arrays` of theirs were compared with plain's, how many were `equal` to
the bit, and facts of its own.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import memplan
from memplan.compilation.callback import Callback
from memplan.planning.plan import Plan
from memplan.planning.slabs.slabs import Slabs
from memplan.planning.transforms import LoopResiduals
from memplan.verify.numbers import compare, nudged
from memplan.verify.same_module import judge
from memplan.xla.module import Module
from tests.gpu_runtime.modules import mutants
from tests.gpu_runtime.stand_in import follow, lines_of
from tests.gpu_runtime.toys import TOYS, fast_link, mlp
from tests.hlo import read_module, text_of

MIB = 1 << 20


Runs = Sequence[tuple[str, int, int]]  # schedule, its seed, steps


def plain_and_planned(toy: str, shares: Sequence[float], runs: Runs) -> dict[str, Any]:
    """Some runs by plans for these shares of the plain step's bytes, ascending, then the same by the plain step."""
    step, (state, batch) = TOYS[toy]()
    plain = memplan.jit(step, donate_argnums=0).plan(state, batch)
    nbytes, options = plain.report.compiled_peak_bytes, {"device": fast_link(), "split": False}
    plans = [
        memplan.jit(step, donate_argnums=0, budget=int(share * nbytes), **options).plan(
            state, batch
        )
        for share in sorted(shares)
    ]
    rows, of_runs = zip(
        *(_run(planned, state, batch, runs) for planned in [*plans, plain]), strict=True
    )
    results = [[*itertools.chain(*outputs)] for outputs in of_runs]
    return {
        "programs": len(rows), "arrays": sum(map(len, results[:-1])),
        "equal": sum(equal(leaves, results[-1]) for leaves in results[:-1]), "rows": rows,
        "finite": all(np.isfinite(leaf).all() for leaf in results[-1] if leaf.dtype.kind == "f"),
    }  # fmt: skip


def rewritten(toy: str, share: float, split: str | bool, runs: Runs) -> dict[str, Any]:
    """Runs of a program in slabs, or whose loops stack less, by the gate: its sums are others than the plain step's.

    Of runs of as many steps the first goes through the gate, and the others have its bits. What another compilation
    does to the step by itself is taken from a CPU: on the stand-in it does next to nothing, as its libraries sum alike
    however a step is cut into kernels.
    """
    step, (state, batch) = TOYS[toy]()
    plain = memplan.jit(step, donate_argnums=0).plan(state, batch)
    budget = int(share * plain.report.compiled_peak_bytes)
    options = {"budget": budget, "device": fast_link(), "split": split}
    planned = memplan.jit(step, donate_argnums=0, **options).plan(state, batch)
    (row, actual), (_, expected) = (_run(stage, state, batch, runs) for stage in (planned, plain))
    # by the number of steps, the first run's
    first, gates, arrays, same = (dict[int, list[np.ndarray]](), [], 0, 0)
    for (_, _, steps), leaves, expected_leaves in zip(runs, actual, expected, strict=True):
        if steps in first:
            arrays, same = arrays + len(leaves), same + equal(leaves, first[steps])
        else:
            first[steps] = leaves
            gates.append(compare(expected_leaves, _on_a_cpu(step, state, batch, steps), leaves))
    report, transforms = planned.report, planned.plan.transforms
    residuals = (
        decision.residuals for decision in transforms if isinstance(decision, LoopResiduals)
    )
    slabs = (transform for transform in transforms if isinstance(transform, Slabs))
    return {
        "programs": 2, "arrays": arrays, "equal": same, "row": row,
        "passes": all(gate.passes for gate in gates), "gate": "\n".join(map(str, gates)),
        "loops on the host": sum(
            len(loop.on_host) for loop in itertools.chain(*residuals) if loop is not None
        ),
        "slabs on the host": sum(len(part.on_host) for part in slabs),
        "copies": report.loop_copies, "kernels": report.loop_kernels,
        "loops": planned.compile().as_text().count(" while("),
    }  # fmt: skip


def _on_a_cpu(step: Callable[..., Any], state: Any, batch: Any, steps: int) -> list[np.ndarray]:
    metrics = None
    with jax.default_device(jax.devices("cpu")[0]):
        for _ in range(steps):
            state, metrics = jax.jit(step)(state, batch)
    return fetched((state, metrics))


def beside_a_cpu(toy: str) -> dict[str, Any]:
    """A plain step against a CPU's, by the gate; noise is what one rounding of each argument makes of the latter."""
    step, args = TOYS[toy]()
    draw, cpu = np.random.default_rng(0), jax.devices("cpu")[0]
    gpu_leaves, cpu_leaves = (
        fetched(jax.jit(step)(*jax.device_put(args, jax.devices(backend)[0])))
        for backend in ("cuda", "cpu")
    )
    noise = []
    for _ in range(3):
        off = jax.tree.map(lambda leaf: nudged(leaf, draw), args)
        noise.append(fetched(jax.jit(step)(*jax.device_put(off, cpu))))
    gate = compare(cpu_leaves, noise[0], gpu_leaves, *noise[1:])
    return {
        "programs": 1, "arrays": 0, "equal": 0, "passes": gate.passes, "gate": str(gate),
        "largest": max(leaf.planned for leaf in gate.leaves),
    }  # fmt: skip


def _run(
    planned: Any, state: Any, batch: Any, runs: Runs
) -> tuple[dict[str, Any], list[list[np.ndarray]]]:
    """What some runs of a step took, and what came out of each. `state` is left as it is."""
    call, results, leaks = planned.compile(), list[list[np.ndarray]](), list[int]()
    batch, pinned = jax.block_until_ready(jax.tree.map(jax.numpy.array, batch)), _pinned_nbytes()
    for schedule, seed, steps in runs:
        follow(schedule, seed)
        new, metrics, in_use = jax.block_until_ready(jax.tree.map(jax.numpy.array, state)), None, []
        for _ in range(steps):
            new, metrics = jax.block_until_ready(call(new, batch))
            in_use.append(jax.devices()[0].memory_stats()["bytes_in_use"])
        results.append(fetched((new, metrics)))
        leaks.append(in_use[-1] - in_use[0])
    pinned, report = _pinned_nbytes() - pinned, planned.report
    row = {
        "status": report.status, "compiled": report.compiled_peak_bytes, "observed": report.observed_peak_bytes,
        "host": report.host_peak_bytes, "pinned": report.pinned_bytes, "newly pinned": pinned,
        "copies": report.copies_found, "again": report.recomputations_found, "leaks": leaks,
    }  # fmt: skip
    return row, results


def _pinned_nbytes() -> int:
    """Pinned host memory that the driver has handed out so far; XLA gives none back."""
    lines = lines_of(Path(os.environ["STAND_IN_LOG"]))
    return sum(int(words[4]) for words in lines if words[2] == "HOSTALLOC")


def requests(folder: str) -> dict[str, Any]:
    """One step by a saved plan, with and without donation, called again, by two threads, in between failures."""
    step, (params, batch) = TOYS["mlp"]()
    start = jax.tree.map(np.asarray, params)
    plain = memplan.jit(step).plan(params, batch)
    expected = fetched(plain.compile()(params, batch))
    budget = int(0.85 * plain.report.compiled_peak_bytes)
    facts: dict[str, Any] = {"programs": 1, "arrays": 0, "equal": 0}

    def check(label: str, results: Any) -> None:
        leaves = fetched(results)
        facts[label] = equal(leaves, expected) == len(expected)
        facts["arrays"] += len(leaves)
        facts["equal"] += equal(leaves, expected)

    planned = memplan.jit(step, budget=budget, device=fast_link(), split=False)
    check("kept arguments", planned(params, batch))
    check("second call", planned(params, batch))
    path = Path(folder) / "plan.json"
    saved = planned.plan(params, batch).plan
    assert saved is not None
    saved.save(path)
    followed = memplan.jit(step, budget=budget, plan=Plan.load(path), split=False)
    check("saved plan", followed(params, batch))
    donating = memplan.jit(step, budget=budget, device=fast_link(), split=False, donate_argnums=0)
    own_params = jax.tree.map(jax.numpy.asarray, start)
    check("donated arguments", donating(own_params, batch))
    facts["donated arguments are gone"] = all(leaf.is_deleted() for leaf in own_params)
    facts["wrong arguments"] = raised(lambda: planned(params, batch[:, :7]))
    check("behind an exception", planned(params, batch))
    facts["does not fit"] = raised(lambda: memplan.jit(step, budget=1 * MIB)(params, batch))
    check("behind a budget that nothing fits", planned(params, batch))

    results: list[Any] = [None] * 2
    barrier = threading.Barrier(len(results))

    def call(number: int) -> None:
        barrier.wait()
        results[number] = planned(params, batch)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(len(results))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, result in enumerate(results):
        check(f"thread {number}", result)

    # The batch is there before: a copy that jax makes of NumPy's array may still be when the results are.
    (state, batch), in_use = (
        jax.block_until_ready(jax.tree.map(jax.numpy.array, (start, batch))),
        [],
    )
    for _ in range(20):
        state, _ = jax.block_until_ready(donating(state, batch))
        in_use.append(jax.devices()[0].memory_stats()["bytes_in_use"])
    facts["leaked"] = max(in_use) - in_use[0]
    return {**facts, "programs": 4}


def held(share: float, folder: str) -> dict[str, Any]:
    """Three steps whose parameters, of 1 MiB each, live in host memory all the time; also by the saved plan."""
    step, (params, batch) = TOYS["wide mlp"]()
    plain = memplan.jit(step, donate_argnums=0).plan(params, batch)
    budget = int(share * plain.report.compiled_peak_bytes)
    options = {"donate_argnums": 0, "budget": budget, "host_state": 0, "split": False}
    planned = memplan.jit(step, **options).plan(params, batch)
    path = Path(folder) / "plan.json"
    planned.plan.save(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a plan that is made again is told in one
        followed = memplan.jit(step, **options, plan=Plan.load(path)).plan(params, batch)
    results, kinds, pinned = [], set[str](), []
    for stage in (planned, followed, plain):
        state = jax.block_until_ready(jax.tree.map(jax.numpy.array, params))
        call, before = stage.compile(), _pinned_nbytes()
        state = jax.block_until_ready(stage.place(state))
        for _ in range(3):
            state, loss = jax.block_until_ready(call(state, batch))
        pinned.append(_pinned_nbytes() - before)
        kinds |= {leaf.sharding.memory_kind for leaf in state}
        results.append(fetched((state, loss)))
    report = planned.report
    return {
        "programs": 3, "arrays": 2 * len(results[0]),
        "equal": sum(equal(leaves, results[-1]) for leaves in results[:-1]),
        "kinds": sorted(kinds), "compiled": report.compiled_peak_bytes, "budget": budget,
        "on host": report.host_peak_bytes, "pinned": report.pinned_bytes, "newly pinned": pinned[0],
    }  # fmt: skip


def too_little_memory(share: float) -> dict[str, Any]:
    """A planned step where the device's pool, or the pinned one, has too little left; then with enough again."""
    step, args = TOYS["mlp"]()
    params, batch = jax.block_until_ready(jax.tree.map(jax.numpy.array, args))
    plain = memplan.jit(step).plan(params, batch)
    nbytes = plain.report.compiled_peak_bytes
    planned = memplan.jit(step, budget=int(share * nbytes), device=fast_link(), split=False)
    planned.plan(params, batch)
    stats = jax.devices()[0].memory_stats()
    junk = jax.device_put(np.zeros(stats["largest_free_block_bytes"] - 2 * MIB, np.int8))
    junk.block_until_ready()
    failure = raised(lambda: planned(params, batch))
    junk.delete()
    results = [fetched(function(params, batch)) for function in (plain.compile(), planned)]
    return {"programs": 2, "arrays": len(results[0]), "equal": equal(*results), "failure": failure}


def too_little_pinned_memory(share: float) -> dict[str, Any]:
    """A planned step where its host temporaries cannot be pinned; then the plain one."""
    step, (params, batch) = TOYS["mlp"]()
    plain = memplan.jit(step).plan(params, batch)
    budget = int(share * plain.report.compiled_peak_bytes)
    planned = memplan.jit(step, budget=budget, device=fast_link(), split=False)
    failure = raised(lambda: planned(params, batch))
    results = [fetched(plain.compile()(params, batch)) for _ in range(2)]
    return {"programs": 2, "arrays": len(results[0]), "equal": equal(*results), "failure": failure}


def fetched(results: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(results)]


def equal(arrays: Sequence[np.ndarray], references: Sequence[np.ndarray]) -> int:
    """How many arrays are the same to the bit."""
    pairs = zip(arrays, references, strict=True)
    return sum(
        array.dtype == reference.dtype and array.tobytes() == reference.tobytes()
        for array, reference in pairs
    )


def raised(call: Callable[[], Any]) -> str:
    """Class and first words of what a call raises."""
    try:
        jax.block_until_ready(call())
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]
    return "nothing"


def mutated_modules(share: float, count: int) -> dict[str, Any]:
    """The first mutants of a planned module: what the judge says of them, what XLA says, what comes out of them.

    Of each: whether the judge refuses it, whether XLA does, how many results are plain's, and the lines of the log.
    """
    # within 70 % of its bytes, parameters are read after their update left
    step, (params, batch) = mlp(16, 512, 64)
    start = jax.tree.map(np.asarray, params)
    plain = memplan.jit(step, donate_argnums=0).plan(params, batch)
    options = {"donate_argnums": 0, "host_state": 0, "split": False}
    options["budget"] = int(share * plain.report.compiled_peak_bytes)
    modules: list[Module] = []  # as XLA scheduled the step, and as it was planned
    mutant: list[Module] = []  # what XLA gets in its place
    callback = Callback.__call__

    def call(self: Callback, scheduled: Module) -> Module | None:
        planned = callback(self, scheduled)
        modules[:] = scheduled, planned or scheduled
        return mutant[0] if mutant else planned

    Callback.__call__ = call  # type: ignore[method-assign]
    planned = memplan.jit(step, **options).plan(params, batch)
    # Mutants are read from XLA's print, where a library's product states a precision that was left
    # out before: the judge compares them with a module that is read from XLA's print, too.
    before, written = (read_module(text_of(module)) for module in modules)
    judge(before, written)
    expected, *_ = [_once(stage, start, batch) for stage in (planned, plain)]
    rows = []
    for fault, text in itertools.islice(mutants(text_of(written)), count):
        mutant[:] = [read_module(text)]
        refusal = raised(lambda: judge(before, mutant[0]))
        first = _log_lines()
        row: dict[str, Any] = {
            "way": fault,
            "judge": refusal.split(":")[0],
            "arrays": len(expected),
        }
        try:
            stage = memplan.jit(step, **options, verify=None).plan(params, batch)
            row |= {"xla": "", "equal": equal(_once(stage, start, batch), expected)}
        except Exception as error:
            row["xla"] = f"{type(error).__name__}: {error}"[:300]
        rows.append({**row, "lines": [first, _log_lines()]})
    return {"programs": 2 + len(rows), "arrays": 0, "equal": 0, "mutants": rows}


def _once(planned: Any, start: Any, batch: Any) -> list[np.ndarray]:
    state = planned.place(jax.tree.map(jax.numpy.asarray, start))
    return fetched(jax.block_until_ready(planned.compile()(state, batch)))


def _log_lines() -> int:
    return Path(os.environ["STAND_IN_LOG"]).read_text().count("\n")


def with_workspace(share: float) -> dict[str, Any]:
    """A step with XLA's autotuner, planned within the bytes of the plain step less a share of its largest workspace."""
    step, (state, batch) = TOYS["normalized"]()
    options = {"donate_argnums": 0, "compiler_options": {"xla_gpu_autotune_level": 1}}
    plain = memplan.jit(step, **options).plan(state, batch)
    report = plain.report
    budget = int(report.compiled_peak_bytes - share * report.workspace_bytes)
    planned = memplan.jit(step, budget=budget, verify="numbers", **options).plan(state, batch)
    followed = memplan.jit(step, budget=budget, plan=planned.plan, **options).plan(state, batch)
    actual, expected = (
        [np.asarray(leaf) for leaf in jax.tree_util.tree_leaves(stage.compile()(*copies))]
        for stage, copies in ((planned, _copies(state, batch)), (plain, _copies(state, batch)))
    )
    return {
        "reports": [json.loads(stage.report.to_json()) for stage in (plain, planned, followed)],
        "transforms": [transform.tag for transform in planned.plan.transforms],
        "programs": 2, "arrays": len(expected), "equal": equal(actual, expected),
    }  # fmt: skip


def _copies(state: Any, batch: Any) -> tuple[Any, Any]:
    return jax.tree.map(jax.numpy.asarray, (state, batch))
