"""How much faster LMS gets by a faster link, and how much faster memplan's own planner is than LMS.

python -m experiments.lms [--only CASE...] [--table]

Measures each case, a size of images on a machine, writes results/CASE.json, and then the table of README.md.
Takes half an hour on two cores; needs the extra gpu-aot.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from experiments.lms.planner import LargeModelSupport
from experiments.readme import command_line, conditions, grid
from memplan import pipeline
from memplan.compilation.outcome import Outcome
from memplan.planning.schedule import Kind
from memplan.program.lowerable import Lowerable
from memplan.request import Request, target_of
from memplan.units import parse_bytes
from memplan.xla.replay import replay
from models.steps import Built
from models.train import googlenet_step

README = Path(__file__).with_name("README.md")
# The memory of a V100 of 16 GB, less what the driver and the libraries take. The same for all machines, also those
# with more memory, so that they differ in nothing but their rates and links.
BUDGET = "15GiB"
HOST_BUDGET = "256GiB"  # more than any plan uses, so that it decides nothing
BATCH = 5  # IBM's
IMAGES = (2240, 2560)  # the smallest and the largest of IBM's images, pixels a side
MACHINES = ("v100", "v100@power9-nvlink2", "gh200", "gb200")
CASES: Mapping[str, tuple[int, str]] = {
    f"{image}-{name}": (image, name) for image in IMAGES for name in MACHINES
}
IBM_PAIR = ("v100", "v100@power9-nvlink2")  # the machines that IBM compared
# Measured by IBM with Caffe and with Chainer: 3.7 and 3.8 times, see README.md.
IBM_RATIO = "3.7 to 3.8"
PLANNERS = {
    "LMS": LargeModelSupport(),
    "LMS, waiting": LargeModelSupport(overlaps=False),
    "memplan": None,
}


def measure(name: str) -> str:
    """The JSON of a case: a row for `jax.jit`, LMS with and without overlap, and memplan."""
    image, machine = CASES[name]
    built = googlenet_step(image, BATCH)
    rows = {"jax.jit": _plain(built, machine)}
    rows |= {method: _planned(built, machine, method) for method in PLANNERS}
    facts = {"image": image, "machine": machine, "budget_bytes": parse_bytes(BUDGET, 0)}
    return json.dumps({**facts, "rows": rows, **conditions("jax", "jaxlib", "flax")}, indent=1)


def _plain(built: Built, machine: str) -> dict[str, Any]:
    """The step by `jax.jit`, which rematerializes by itself what does not fit the card."""
    step, arguments = built
    target = target_of(machine)
    executable = target.compile(Lowerable(step, arguments, {}, {"donate_argnums": 0}))
    device_bytes = executable.memory.device_bytes
    return {
        "fits": device_bytes <= parse_bytes(BUDGET, 0),
        "device_bytes": device_bytes,
        "step_s": replay(executable.module, target.device).step_s,
    }


def _planned(built: Built, machine: str, method: str) -> dict[str, Any]:
    """The step by a planner. Only memplan's own may choose slabs instead: they are no part of LMS."""
    step, arguments = built
    planner = PLANNERS[method]
    split = "auto" if planner is None else False
    request = Request(BUDGET, HOST_BUDGET, machine, planner=planner, split=split)
    return _row(pipeline.best(step, arguments, {}, {"donate_argnums": 0}, request))


def _row(outcome: Outcome) -> dict[str, Any]:
    planned = outcome.planned
    seconds = planned.result.replay
    runs = sum(action.kind is Kind.RUN for action in planned.schedule)
    plain = outcome.unmodified or planned.plain
    return {
        "fits": outcome.fits,
        "method": outcome.method,
        "device_bytes": outcome.device_bytes,
        "unmodified_bytes": plain.device_bytes,
        "unmodified_s": plain.replay.step_s,
        "host_bytes": outcome.host_bytes,
        "offloaded_bytes": int(seconds.copied_out_nbytes),
        "again": runs - len(planned.base.problem.kernels) if planned.plan else 0,
        "extra_outputs": len(planned.plan.extra_outputs) if planned.plan else 0,
        "step_s": outcome.step_s,
        "copy_s": seconds.copy_s,
        "stall_s": sum(end - start for start, end in seconds.stalls),
        "planning_s": planned.planning_s,
    }


def table() -> str:
    """The tables of the README, from the results that are there."""
    results = [json.loads(path.read_text()) for path in map(_result, CASES) if path.exists()]
    head = (
        "image",
        "machine",
        "method",
        "fits",
        "device GiB",
        "host GiB",
        "runs again",
        "step ms",
        "over unmodified",
    )
    steps = grid(head, (row for result in results for row in _rows(result)))
    ratios = grid(
        ("seconds over seconds", *(f"{image}^2" for image in IMAGES), "IBM measured"), _ratios()
    )
    versions = ", ".join(f"{name} {version}" for name, version in results[0]["versions"].items())
    return f"{steps}\n\n{ratios}\n\nPredicted with {versions}.\n"


def _result(name: str) -> Path:
    return README.parent / "results" / f"{name}.json"


def _rows(result: Mapping[str, Any]) -> Iterator[tuple[object, ...]]:
    unmodified_s = result["rows"]["memplan"]["unmodified_s"]
    for method, row in result["rows"].items():
        yield (
            f"{result['image']}^2", result["machine"], method, "yes" if row["fits"] else "no",
            f"{row['device_bytes'] / 2**30:.2f}", f"{row.get('host_bytes', 0) / 2**30:.2f}", row.get("again", 0),
            f"{1e3 * row['step_s']:.0f}", f"{row['step_s'] / unmodified_s:.2f}",
        )  # fmt: skip


def _ratios() -> Iterator[tuple[object, ...]]:
    """Ratios by the size of the images: of the links of IBM's two machines, then of LMS and memplan."""
    slow, fast = IBM_PAIR
    for method in PLANNERS:
        measured = IBM_RATIO if method == "LMS" else ""
        yield (
            f"{method}: PCIe 3 over NVLink 2.0",
            *_by_image((slow, method), (fast, method)),
            measured,
        )
    for machine in MACHINES:
        yield f"{machine}: LMS over memplan", *_by_image((machine, "LMS"), (machine, "memplan")), ""


def _by_image(above: tuple[str, str], below: tuple[str, str]) -> Iterator[str]:
    """Seconds over seconds, each of (machine, method); a dash if a plan does not fit or is not measured."""
    for image in IMAGES:
        above_s, below_s = _seconds(image, *above), _seconds(image, *below)
        yield f"{above_s / below_s:.2f}" if above_s and below_s else "-"


def _seconds(image: int, machine: str, method: str) -> float | None:
    path = _result(f"{image}-{machine}")
    row = json.loads(path.read_text())["rows"][method] if path.exists() else {"fits": False}
    return row["step_s"] if row["fits"] else None


if __name__ == "__main__":
    command_line(__doc__, tuple(CASES), measure, README, table)
