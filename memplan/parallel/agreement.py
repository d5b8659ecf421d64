"""Checks before the first step that all processes run the same one, and shares one plan.

Processes are compared only if the mesh has devices of all of them, and if there are several.
"""

import contextlib
import hashlib
import inspect
import json
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from memplan import io
from memplan.errors import MemplanError
from memplan.planning.plan import Plan
from memplan.program import compat
from memplan.program.constants import digest_of, digests_of_constants, type_of
from memplan.program.trace import Program, comparable

_PLAN_S = 900.0  # How long processes wait for the plan of the first one.

Step = Callable[..., Any]


def same_state(processes: tuple[int, ...], step: Step, args: tuple[Any, ...]) -> None:
    """Refuse processes whose arguments differ.

    Raises:
      MemplanError: names the ranks, the argument and its leaf.
    """
    if not _are_all(processes):
        return
    leaves = {
        f"{_argument(step, position)}{jax.tree_util.keystr(path)}": leaf
        for position, value in enumerate(args)
        for path, leaf in jax.tree_util.tree_flatten_with_path(value)[0]
    }
    types = "\n".join(f"{name} {type_of(leaf)}" for name, leaf in leaves.items())
    _refuse_differences(step, {**_versions(), "the types of its arguments": types})
    _refuse_differences(step, {name: digest_of(leaf) for name, leaf in leaves.items()})


def same_step(processes: tuple[int, ...], program: Program, options: Any) -> None:
    """Refuse processes that trace another step, or run it on other devices or with other options.

    Raises:
      MemplanError: names the ranks and what differs: versions, shapes, devices, options, equations
        or constants.
    """
    division = program.traced.division
    if not _are_all(processes) or division is None:
        return
    closed = program.traced.jaxpr
    devices = [f"{device.process_index}:{device.id}" for device in division.devices or ()]
    shardings = [str(getattr(sharding, "spec", sharding)) for sharding in division.inputs]
    _refuse_differences(
        program.step,
        {
            **_versions(),
            "the shapes of its arguments": ", ".join(aval.str_short() for aval in closed.in_avals),
            "the mesh": f"{[dict(mesh.shape) for mesh in division.meshes]} {' '.join(devices)}",
            "the shardings of its arguments": comparable(" ".join(shardings)),
            "the options": comparable(str(options)),
            "its equations": comparable(str(closed)),
            "the constants that it captures": "\n".join(digests_of_constants(closed)),
        },
    )


def same_collectives(processes: tuple[int, ...], step: Step, sequence: str) -> None:
    """Refuse processes whose compiled steps send other collectives, or in another order.

    They would deadlock.

    Args:
      sequence: all collectives of this process's step, in order.

    Raises:
      MemplanError: names the ranks.
    """
    if _are_all(processes):
        _refuse_differences(step, {"the collectives that XLA compiled": sequence})


def one_plan(
    processes: tuple[int, ...], step: Step, fingerprint: str, key: str, make: Callable[[], Plan]
) -> Plan:
    """The plan of the first of these processes; the others wait for it.

    Args:
      fingerprint: identifies this process's module.
      key: a digest of everything the plan depends on.

    Raises:
      MemplanError: the first process failed to plan, or took longer than `_PLAN_S`.
    """
    if len(processes) < 2 or jax.process_index() not in processes:
        return make()
    client = compat.coordination_client()
    name = f"memplan/plan/{key}/{fingerprint}"
    if jax.process_index() == processes[0]:
        try:
            plan = make()
        except Exception as error:
            client.key_value_set(name, json.dumps({"error": str(error)}), allow_overwrite=True)
            raise
        client.key_value_set(name, plan.to_json(), allow_overwrite=True)
        return plan
    try:
        text = client.blocking_key_value_get(name, int(1000 * _PLAN_S))
    except jax.errors.JaxRuntimeError as error:
        raise MemplanError(
            f"process {processes[0]} sent no plan for {_name(step)!r} within {_PLAN_S:.0f} s: it "
            "stopped, or compiles another step. All processes must run the same script, versions "
            "and options."
        ) from error
    answer = json.loads(text)
    if "error" in answer:
        raise MemplanError(
            f"process {processes[0]} could not plan {_name(step)!r}: {answer['error']}"
        )
    return Plan.from_json(text)


def _are_all(processes: tuple[int, ...]) -> bool:
    """Can the processes be compared? jax gathers only from all processes of the run."""
    return 1 < len(processes) == jax.process_count()


def _refuse_differences(step: Step, parts: Mapping[str, str]) -> None:
    """Compare a digest of each part across all processes, which must have equally many parts."""
    if not parts:
        return
    digests = np.array([list(_digest(text)) for text in parts.values()], np.uint8)
    with ThreadPoolExecutor(1) as thread:  # jax gathers nothing in a thread that traces a step
        all_digests = thread.submit(multihost_utils.process_allgather, digests).result()
    by_rank = np.asarray(all_digests).reshape(-1, *digests.shape)
    odd_ranks: dict[str, str] = {}  # name of a part -> the ranks that differ from the majority
    for number, name in enumerate(parts):
        column = [rows[number].tobytes() for rows in by_rank]
        majority = Counter(column).most_common(1)[0][0]
        ranks = [str(rank) for rank, digest in enumerate(column) if digest != majority]
        if ranks:
            odd_ranks[name] = ", ".join(ranks)
    if not odd_ranks:
        return
    differences = "; ".join(
        f"{name} on rank {ranks}" for name, ranks in list(odd_ranks.items())[:5]
    )
    first = next(iter(odd_ranks))
    example = ""
    if len(parts[first]) < 200:
        example = f" Here, on rank {jax.process_index()}, {first} is: {parts[first]}."
    raise MemplanError(
        f"The processes differ in what they give {_name(step)!r}: {differences}.{example} All must "
        "run the same script, versions and options, and begin with the same state."
    )


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _versions() -> dict[str, str]:
    versions = io.versions("jax", "jaxlib", "memplan")
    return {
        "the versions of packages": ", ".join(f"{name} {version}" for name, version in versions)
    }


def _name(step: Step) -> str:
    return getattr(step, "__name__", type(step).__name__)


def _argument(step: Step, position: int) -> str:
    with contextlib.suppress(TypeError, ValueError, IndexError):  # a built-in function, or *args
        return list(inspect.signature(step).parameters)[position]
    return f"argument {position}"
