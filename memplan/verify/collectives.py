"""Are the collectives of the executable those of the program, and no others? Counted by kind, axes and bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from memplan.program import compat
from memplan.xla.collective_cost import EXCHANGE, GATHER, REDUCE, SCATTER, Collective

_KINDS = {"psum": REDUCE, "reduce_scatter": SCATTER, "all_gather": GATHER, "all_to_all": EXCHANGE}
_LARGEST = ("pmax", "pmin")


def collective_differences(
    jaxpr: compat.ClosedJaxpr, sizes: Mapping[str, int], found: Mapping[Collective, int]
) -> tuple[str, ...]:
    """What is missing and what is there besides, in words.

    Args:
      jaxpr: what one device runs.
      sizes: of the mesh's axes.
      found: how often each collective runs in the executable.
    """
    written: Counter[Collective] = Counter()
    for one, times in _of_program(jaxpr, sizes, 1):
        written[one] += times
    differences = []
    for one in sorted({*written, *found}, key=str):
        if written[one] != found.get(one, 0):
            differences.append(f"{one} of {one.nbytes} bytes runs {found.get(one, 0)} times instead of {written[one]}")
    return tuple(differences)


def _of_program(jaxpr: compat.ClosedJaxpr, sizes: Mapping[str, int], times: int) -> Iterator[tuple[Collective, int]]:
    for eqn in jaxpr.jaxpr.eqns:
        scan = compat.scan_of(eqn)
        if scan is not None:
            yield from _of_program(scan.body, sizes, times * scan.trips)
        name = eqn.primitive.name
        if name not in _KINDS and name not in _LARGEST:
            continue
        named = eqn.params.get("axes") or eqn.params["axis_name"]
        named = (named,) if isinstance(named, str) else tuple(named)
        axes = tuple(axis for axis, size in sizes.items() if axis in named and size > 1)
        if axes:
            for operand, result in zip(eqn.invars, eqn.outvars, strict=True):
                nbytes = max(compat.nbytes_of(operand.aval), compat.nbytes_of(result.aval))
                yield Collective(_KINDS.get(name, REDUCE), axes, nbytes), times
