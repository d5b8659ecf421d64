"""Before training: do all processes run the same programs on like machines, and does a first all-reduce go through?

Small texts are compared through jax.distributed's key-value store, so that a difference is an error that names the
rank, where it would otherwise be a hang or wrong numbers.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import itertools
import json
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from memplan.errors import MemplanError
from memplan.parallel.runtime.cluster import Cluster
from memplan.parallel.runtime.comparison import majority_rank
from memplan.program import compat

SHOWN = 300  # characters of a value in a message
_rounds = itertools.count()  # all processes compare the same things in the same order, so theirs agree


@dataclass(frozen=True)
class Preflight:
    """What was found.

    Attributes:
      hosts: of each rank.
      versions: what all processes run.
      devices_each: devices of each process; `kind` of all of them.
      first_all_reduce_s: seconds of the first all-reduce, with connecting and compiling; the second without.
    """

    hosts: tuple[str, ...]
    versions: Mapping[str, str]
    devices_each: int
    kind: str
    first_all_reduce_s: float
    second_all_reduce_s: float


def preflight(cluster: Cluster, *, timeout_s: float = 60.0) -> Preflight:
    """Compare versions and devices of all processes and sum one number over all devices.

    Raises:
      MemplanError: naming the rank and host with other versions, another number or kind of devices, a wrong sum, or
        that did not answer within `timeout_s`.
    """
    versions, local = local_versions(), jax.local_devices()
    agree("versions", versions, cluster, timeout_s=timeout_s)
    agree("devices of each process", len(local), cluster, timeout_s=timeout_s)
    agree("kind of device", local[0].device_kind, cluster, timeout_s=timeout_s)
    hosts = tuple(cluster.members[rank].host for rank in range(cluster.processes))
    return Preflight(hosts, versions, len(local), local[0].device_kind, *_all_reduces())


def local_versions() -> dict[str, str]:
    """What must be the same everywhere."""
    try:
        own = importlib.metadata.version("memplan")
    except importlib.metadata.PackageNotFoundError:
        own = "from source"
    return {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "memplan": own,
    }


def _all_reduces() -> tuple[float, float]:
    mesh = Mesh(np.array(jax.devices()), ("every",))
    spread = NamedSharding(mesh, PartitionSpec("every"))
    ones = jax.make_array_from_callback((mesh.size,), spread, lambda _: np.ones(1, np.float32))
    total = jax.jit(jax.numpy.sum, out_shardings=NamedSharding(mesh, PartitionSpec()))
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        found = float(total(ones))
        seconds.append(time.perf_counter() - start)
        if found != mesh.size:
            raise MemplanError(
                f"The sum of a one from each of {mesh.size} devices is {found:g}: the interconnect or its library "
                "gives wrong numbers. Test it on its own (nccl-tests for NVIDIA GPUs) before training."
            )
    return seconds[0], seconds[1]


def agree(name: str, value: Any, cluster: Cluster, *, timeout_s: float = 60.0) -> None:
    """Check that all processes give the same value: shapes, a fingerprint, options. All must call it, in one order.

    Args:
      name: what the value is, for the message.
      value: anything whose `repr` says it all; a mapping is compared sorted by key.

    Raises:
      MemplanError: naming the ranks and hosts whose value is not what most have, with both values; or the ranks that
        did not answer within `timeout_s`.
    """
    if cluster.processes == 1:
        return
    text = repr(dict(sorted(value.items()))) if isinstance(value, Mapping) else repr(value)
    described = {"text": text[:20_000], "digest": hashlib.sha256(text.encode()).hexdigest()}
    everyone = _exchange(f"{next(_rounds)}/{name}", json.dumps(described), cluster, timeout_s)
    found = {rank: json.loads(one) for rank, one in everyone.items()}
    if len({one["digest"] for one in found.values()}) > 1:
        raise MemplanError(_disagreement(name, found, cluster))


def _exchange(key: str, value: str, cluster: Cluster, timeout_s: float) -> dict[int, str]:
    """Every process's value for this key."""
    store = compat.coordination_client()
    store.key_value_set(f"memplan/agree/{key}/{cluster.process}", value)
    end = time.monotonic() + timeout_s
    found: dict[int, str] = {}
    for rank in range(cluster.processes):
        left_ms = max(1, round(1000 * (end - time.monotonic())))
        try:
            found[rank] = store.blocking_key_value_get(f"memplan/agree/{key}/{rank}", left_ms)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
    if missing := [str(cluster.members[rank]) for rank in range(cluster.processes) if rank not in found]:
        raise MemplanError(
            f"{', '.join(missing)} did not answer for {key.split('/', 1)[1]!r} within {timeout_s:g} s. It is busy with "
            "something else, or does not make the same calls in the same order."
        )
    return found


def _disagreement(name: str, found: Mapping[int, Mapping[str, str]], cluster: Cluster) -> str:
    usual = majority_rank({rank: one["digest"] for rank, one in found.items()})
    most = found[usual]["digest"]
    odd = [rank for rank in found if found[rank]["digest"] != most]
    theirs, ours = _shortened(found[odd[0]]["text"], found[usual]["text"])
    also = f" (and rank {', '.join(map(str, odd[1:]))})" if odd[1:] else ""
    return (
        f"The processes disagree on {name}: {cluster.members[odd[0]]}{also} has {theirs}, {cluster.members[usual]} has "
        f"{ours}. All must run the same script, versions and options on the same number of devices."
    )


def _shortened(one: str, other: str) -> tuple[str, str]:
    """Both from a little before their first difference."""
    pairs = zip(one, other, strict=False)
    first = next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
    start = 0 if max(len(one), len(other)) <= SHOWN else max(0, first - SHOWN // 3)

    def shown(text: str) -> str:
        piece = text[start : start + SHOWN]
        return ("..." if start else "") + piece + ("..." if len(text) > start + SHOWN else "")

    return shown(one), shown(other)
