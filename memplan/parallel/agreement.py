"""All processes of a mesh must run the same: differences are refused before the first step, and all follow one plan.

Processes are compared if the mesh has devices of all of them; with one process there is nothing to compare.
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

_PLAN_S = 900.0  # the first process plans while the others wait

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
      MemplanError: names the ranks and what differs: versions, shapes, devices, options, equations or constants.
    """
    division = program.traced.division
    if not _are_all(processes) or division is None:
        return
    closed = program.traced.jaxpr
    devices = [f"{one.process_index}:{one.id}" for one in division.devices or ()]
    shardings = [str(getattr(one, "spec", one)) for one in division.inputs]
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
    """Refuse processes whose compiled steps do not send the same collectives in the same order: they would wait for
    each other without end.

    Args:
      sequence: of all collectives of this process's step.

    Raises:
      MemplanError: names the ranks.
    """
    if _are_all(processes):
        _refuse_differences(step, {"the collectives that XLA compiled": sequence})


def one_plan(processes: tuple[int, ...], step: Step, fingerprint: str, key: str, make: Callable[[], Plan]) -> Plan:
    """The plan of the first of these processes; the others wait for it.

    Args:
      fingerprint: of this process's module.
      key: a digest of everything the plan depends on.

    Raises:
      MemplanError: the first process could not make one, or not within `_PLAN_S`.
    """
    if len(processes) < 2 or jax.process_index() not in processes:
        return make()
    client, place = compat.coordination_client(), f"memplan/plan/{key}/{fingerprint}"
    if jax.process_index() == processes[0]:
        try:
            plan = make()
        except Exception as error:
            client.key_value_set(place, json.dumps({"error": str(error)}), allow_overwrite=True)
            raise
        client.key_value_set(place, plan.to_json(), allow_overwrite=True)
        return plan
    try:
        text = client.blocking_key_value_get(place, int(1000 * _PLAN_S))
    except jax.errors.JaxRuntimeError as error:
        raise MemplanError(
            f"process {processes[0]} sent no plan for {_name(step)!r} within {_PLAN_S:.0f} s: it stopped, or compiles "
            "another step. All processes must run the same script, versions and options."
        ) from error
    if "error" in (found := json.loads(text)):
        raise MemplanError(f"process {processes[0]} could not plan {_name(step)!r}: {found['error']}")
    return Plan.from_json(text)


def _are_all(processes: tuple[int, ...]) -> bool:
    """Whether the processes can be compared: jax gathers from all of them, not from some."""
    return 1 < len(processes) == jax.process_count()


def _refuse_differences(step: Step, parts: Mapping[str, str]) -> None:
    """Gather a digest of each part from all processes, which must have equally many parts."""
    own = np.array([list(hashlib.blake2b(text.encode(), digest_size=16).digest()) for text in parts.values()], np.uint8)
    if not len(own):
        return
    with ThreadPoolExecutor(1) as apart:  # jax gathers nothing in a thread that traces a step
        everyone = np.asarray(apart.submit(multihost_utils.process_allgather, own).result()).reshape(-1, *own.shape)
    differing: dict[str, str] = {}  # name of a part -> the ranks that differ from most
    for number, name in enumerate(parts):
        digests = [rows[number].tobytes() for rows in everyone]
        usual = Counter(digests).most_common(1)[0][0]
        if odd := [str(rank) for rank, digest in enumerate(digests) if digest != usual]:
            differing[name] = ", ".join(odd)
    if not differing:
        return
    listed = "; ".join(f"{name} on rank {odd}" for name, odd in list(differing.items())[:5])
    first = next(iter(differing))
    short = len(parts[first]) < 200
    here = f" Here, on rank {jax.process_index()}, {first} is: {parts[first]}." if short else ""
    raise MemplanError(
        f"The processes differ in what they give {_name(step)!r}: {listed}.{here} All must run the same script, "
        "versions and options, and begin with the same state."
    )


def _versions() -> dict[str, str]:
    found = dict(io.versions("jax", "jaxlib", "memplan"))
    return {"the versions of packages": ", ".join(f"{name} {version}" for name, version in found.items())}


def _name(step: Step) -> str:
    return getattr(step, "__name__", type(step).__name__)


def _argument(step: Step, position: int) -> str:
    with contextlib.suppress(TypeError, ValueError, IndexError):  # a built-in function, or *args
        return list(inspect.signature(step).parameters)[position]
    return f"argument {position}"
