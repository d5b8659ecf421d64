"""All processes of a mesh must give the same: what each gives is described, and compared by the monitor of rank 0.

Nothing is done, and nothing paid, where a mesh has the devices of one process.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from memplan.errors import MemplanError
from memplan.parallel.runtime import cluster
from memplan.parallel.runtime.comparison import APART, PROGRAM, ROWS, VALUES, Submission, submission
from memplan.planning.plan import Plan
from memplan.program import compat

COMPARED = 4  # of the same kind of values, the first few: training begins with them, and hashing takes a second per GB
PRIVATE = re.compile(r"0x[0-9a-f]+|id=\d+|/[^\s:]+(?=:\d+)")  # of one process: addresses, paths
PLAN_S = 900.0  # the first process plans while the others wait
UNORDERED = re.compile(r"\{('[^{}]*')\}")  # sets of names come in another order in each process

Step = Callable[..., Any]
_compared: dict[tuple[str, ...], int] = {}


def same_rows(mesh: Mesh, step: Step, position: int, batch: Any) -> None:
    """Called with each process's own rows, before anything is made of them."""
    if among := _among(mesh):
        apart = APART if threading.current_thread() is not threading.main_thread() else ""
        lines = tuple(f"{_type(leaf)} in {_argument(step, position)}{path}" for path, leaf in _leaves(batch))
        cluster.submissions.submit_rows(_rows(f"{_name(step)}/{position}{apart}", repr(_name(step)), lines, among))


@functools.lru_cache(maxsize=64)  # every step brings the same
def _rows(key: str, name: str, lines: tuple[str, ...], among: tuple[int, ...]) -> Submission:
    return submission(ROWS, key, name, lines, among)


def same_values(mesh: Mesh | AbstractMesh, step: Step, values: tuple[Any, ...]) -> None:
    """Called with arguments of the step that every process has whole."""
    if not (among := _among(mesh)):
        return
    leaves = [
        (f"{_argument(step, position)}{path}", leaf)
        for position, value in enumerate(values)
        for path, leaf in _leaves(value)
    ]
    kind = (_name(step), *(f"{path} {_type(leaf)}" for path, leaf in leaves))
    _compared[kind] = _compared.get(kind, 0) + 1
    if _compared[kind] <= COMPARED:
        lines = [f"{path} {_type(leaf)} of digest {_digest(leaf)}" for path, leaf in leaves]
        cluster.submissions.submit_values(submission(VALUES, _name(step), repr(_name(step)), lines, among))


def same_step(mesh: Mesh | AbstractMesh, step: Step, program: compat.ClosedJaxpr, options: Any) -> None:
    """Called with a step's program for some shapes, and with all that decides how it is divided."""
    if not (among := _among(mesh)):
        return
    shapes = ", ".join(aval.str_short() for aval in program.in_avals)
    key = hashlib.blake2b(shapes.encode(), digest_size=8).hexdigest()
    lines = [f"shapes {shapes}", *_options(mesh, options), *_plain(str(program)).split("\n"), *_constants(program)]
    cluster.submissions.submit_program(submission(PROGRAM, f"{_name(step)}/{key}", repr(_name(step)), lines, among))


def one_plan(processes: tuple[int, ...], step: Step, fingerprint: str, key: str, make: Callable[[], Plan]) -> Plan:
    """The plan of the first of these processes: the others wait for it, and follow it.

    Args:
      fingerprint: of this process's module; who has another is named.
      key: of all that the plan depends on.
      make: makes it.

    Raises:
      MemplanError: the first process could not make one, or did not within `PLAN_S`.
    """
    if len(processes) < 2 or jax.process_index() not in processes:
        return make()
    if among := _comparable(processes):
        module = f"module {fingerprint}"
        one = submission(PROGRAM, f"{_name(step)}/module", repr(_name(step)), [module], among)
        cluster.submissions.submit_program(one)
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
        text = client.blocking_key_value_get(place, int(1000 * PLAN_S))
    except jax.errors.JaxRuntimeError as error:
        raise MemplanError(
            f"process {processes[0]} told no plan for {_name(step)!r} within {PLAN_S:.0f} s: it stopped, or compiles "
            "another step. All processes must run the same script, versions and options."
        ) from error
    if "error" in (found := json.loads(text)):
        raise MemplanError(f"process {processes[0]} could not plan {_name(step)!r}: {found['error']}")
    return Plan.from_json(text)


def processes_of(tree: Any) -> tuple[int, ...]:
    """Of the devices over which arrays, shapes and shardings in this tree lie."""
    shardings = (getattr(leaf, "sharding", leaf) for leaf in jax.tree.leaves(tree))
    meshes = (one.mesh for one in shardings if isinstance(one, jax.sharding.NamedSharding))
    return tuple(sorted({process for mesh in set(meshes) for process in _processes(mesh)}))


def _name(step: Step) -> str:
    return getattr(step, "__name__", type(step).__name__)


@functools.lru_cache(maxsize=64)
def _argument(step: Step, position: int) -> str:
    with contextlib.suppress(TypeError, ValueError, IndexError):  # a built-in function, or *args
        return list(inspect.signature(step).parameters)[position]
    return f"argument {position}"


def _among(mesh: Mesh | AbstractMesh) -> tuple[int, ...]:
    """The processes of a mesh; none where there is nobody to compare with."""
    return _comparable(_processes(mesh) if jax.process_count() > 1 else ())  # one process may describe devices of many


def _comparable(found: tuple[int, ...]) -> tuple[int, ...]:
    """These processes, if they can be compared."""
    if len(found) < 2 or jax.process_index() not in found:
        return ()
    if not cluster.is_joined() and len(found) < jax.process_count():
        return ()  # the others may never use memplan, and could not be met
    cluster.join_in_background()
    return found


@functools.lru_cache(maxsize=64)
def _processes(mesh: Mesh | AbstractMesh) -> tuple[int, ...]:
    """Of an abstract mesh none: it has no devices."""
    return tuple(sorted({one.process_index for one in mesh.devices.flat})) if isinstance(mesh, Mesh) else ()


def _options(mesh: Mesh | AbstractMesh, options: Any) -> Iterator[str]:
    devices = [f"{one.process_index}:{one.id}" for one in mesh.devices.flat] if isinstance(mesh, Mesh) else []
    yield f"mesh {dict(mesh.shape)} of the devices {' '.join(devices)}"
    yield from (_plain(f"option {one}") for one in options)


def _plain(text: str) -> str:
    """Without what differs between processes that run the same."""
    ordered = UNORDERED.sub(lambda found: "{" + ", ".join(sorted(found[1].split(", "))) + "}", text)
    return PRIVATE.sub("_", ordered)


def _constants(step: compat.ClosedJaxpr) -> Iterator[str]:
    for number, (_, value) in enumerate(compat.consts_of(step)):
        yield f"captured constant {number}: {_type(value)} of digest {_digest(value)}"
    for eqn in step.jaxpr.eqns:
        for inner in compat.sub_jaxprs(eqn):
            yield from _constants(inner) if hasattr(inner, "consts") else ()
        yield from (f"literal of digest {_digest(compat.value_of(atom))}" for atom in eqn.invars if _is_long(atom))


def _is_long(atom: Any) -> bool:
    return not compat.is_var(atom) and np.ndim(atom.val) > 0  # a number stands in the text


def _leaves(tree: Any) -> list[tuple[str, Any]]:
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]]


def _type(leaf: Any) -> str:
    shape = ",".join(map(str, np.shape(leaf)))
    return f"{getattr(leaf, 'dtype', type(leaf).__name__)}[{shape}]"


def _digest(leaf: Any) -> str:
    """Of the bytes of its values; '-' where this process does not have them all."""
    if isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated):
        return "-"
    plain = jax.random.key_data(leaf) if compat.is_key(leaf) else leaf
    found = np.ascontiguousarray(np.asarray(plain)).reshape(-1).view(np.uint8)
    return hashlib.blake2b(found.data, digest_size=8).hexdigest()
