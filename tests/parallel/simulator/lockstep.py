"""A program on several simulated devices at once, in plain NumPy: no devices, no compilation.

One equation after another is evaluated on all devices. A collective sees the values of a whole group; anything else is
computed once for every distinct choice of operands, so that what all devices share is computed once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from memplan.program import compat
from tests.parallel.simulator.kernels import Keys, as_value, computed, wide

Values = list[Any]  # of one variable, on every device


def lockstep(
    closed: compat.ClosedJaxpr,
    inputs: Sequence[Sequence[Any]],
    sizes: Mapping[str, int],
    printed: list[Any] | None = None,
) -> list[Values]:
    """The results of a jaxpr on several simulated devices; keys as `Keys`, anything else as NumPy arrays.

    Args:
      closed: traced with `jax.make_jaxpr(f, axis_env=[(name, size), ...])`, or an ordinary one.
      inputs: for each input its value on every device, numbered row by row.
      sizes: of the axes, outermost first; none for a single device.
      printed: is given `(primitive, operands)` for what has no results, such as `jax.debug.print`.

    Returns:
      For each output its value on every device.
    """
    devices = Devices(sizes, range(math.prod(sizes.values())), [] if printed is None else printed)
    with np.errstate(all="ignore"):
        plain = [
            devices.each(lambda value, aval=var.aval: [as_value(value, aval)], [values])[0]
            for var, values in zip(closed.jaxpr.invars, inputs, strict=True)
        ]
        return devices.run(compat.discharge_references(closed), plain)


class Devices:
    """Some of the devices of a mesh, which are at the same equation."""

    def __init__(self, sizes: Mapping[str, int], numbers: Sequence[int], printed: list[Any]):
        self.sizes, self.numbers, self.printed = sizes, list(numbers), printed
        self._groups: dict[tuple[str, ...], list[list[int]]] = {}

    def run(self, closed: compat.ClosedJaxpr, inputs: Sequence[Values]) -> list[Values]:
        env = {var: self.all_have(as_value(value, var.aval)) for var, value in compat.consts_of(closed)}
        env.update(zip(closed.jaxpr.invars, inputs, strict=True))
        for eqn in closed.jaxpr.eqns:
            results = self.apply(eqn, [self._read(env, atom) for atom in eqn.invars])
            env.update(zip(eqn.outvars, results, strict=True))
        return [self._read(env, atom) for atom in closed.jaxpr.outvars]

    def _read(self, env: Mapping[Any, Values], atom: Any) -> Values:
        return env[atom] if compat.is_var(atom) else self.all_have(as_value(atom.val, atom.aval))

    def apply(self, eqn: compat.JaxprEqn, operands: list[Values]) -> list[Values]:
        """The results of one equation."""
        name = eqn.primitive.name
        if name in HANDLERS:
            return HANDLERS[name](self, eqn, operands)
        if not eqn.outvars:
            self.printed.append((name, operands))
            return []
        return self.each(lambda *column: computed(eqn, column), operands)

    def each(self, function: Callable[..., Sequence[Any]], operands: Sequence[Values]) -> list[Values]:
        """Of what each device has, once for every distinct choice of objects."""
        columns = list(zip(*operands, strict=True)) if operands else [()] * len(self.numbers)
        known: dict[tuple[int, ...], Sequence[Any]] = {}
        found = []
        for column in columns:
            names = tuple(map(id, column))
            if names not in known:
                known[names] = function(*column)
            found.append(known[names])
        return [list(values) for values in zip(*found, strict=True)]

    def all_have(self, value: Any) -> Values:
        return [value] * len(self.numbers)

    def groups(self, axes: Any) -> list[list[int]]:
        """Positions in `numbers` of the devices that agree on all other axes, in the order of the axes."""
        axes = axes if isinstance(axes, tuple) else (axes,)
        if axes not in self._groups:
            self._groups[axes] = self._grouped(axes)
        return self._groups[axes]

    def _grouped(self, axes: tuple[str, ...]) -> list[list[int]]:
        shape, dims = list(self.sizes.values()), [list(self.sizes).index(axis) for axis in axes]
        numbers = np.arange(math.prod(shape)).reshape(shape)
        last = np.moveaxis(numbers, dims, range(numbers.ndim - len(dims), numbers.ndim))
        rows = last.reshape(-1, math.prod(shape[dim] for dim in dims)).tolist()
        places = {number: place for place, number in enumerate(self.numbers)}
        groups = [[places[number] for number in row if number in places] for row in rows]
        if any(0 < len(group) < len(row) for group, row in zip(groups, rows, strict=True)):
            raise ValueError(f"a collective over {axes}, which not all devices of a group have come to")
        return [group for group in groups if group]

    def index(self, axis: str) -> list[int]:
        """Of every device, along an axis."""
        shape = list(self.sizes.values())
        return np.unravel_index(self.numbers, shape)[list(self.sizes).index(axis)].tolist()

    def some(self, places: Sequence[int]) -> Devices:
        return Devices(self.sizes, [self.numbers[place] for place in places], self.printed)

    def apart(self, choices: Sequence[Any], operands: Sequence[Values], run: Branch) -> list[Values]:
        """Those with the same choice go on together: `run(devices, choice, operands)`."""
        if len(set(choices)) == 1:
            return run(self, choices[0], list(operands))
        together: list[dict[int, Any]] = []
        for choice in sorted(set(choices)):
            places = [place for place, other in enumerate(choices) if other == choice]
            results = run(self.some(places), choice, [[values[place] for place in places] for values in operands])
            together = together or [{} for _ in results]
            for known, values in zip(together, results, strict=True):
                known.update(zip(places, values, strict=True))
        return [[known[place] for place in range(len(choices))] for known in together]


Branch = Callable[[Devices, Any, list[Values]], list[Values]]


# Calls and control flow


def _called(devices: Devices, eqn: compat.JaxprEqn, operands: list[Values]) -> list[Values]:
    body = compat.call_body(eqn) or eqn.params.get("jaxpr") or eqn.params["call_jaxpr"]
    return devices.run(body, operands)


def _cond(devices: Devices, eqn: compat.JaxprEqn, operands: list[Values]) -> list[Values]:
    branches = compat.control_bodies(eqn)
    choices = [min(max(int(index), 0), len(branches) - 1) for index in operands[0]]
    return devices.apart(choices, operands[1:], lambda some, choice, values: some.run(branches[choice], values))


def _while(devices: Devices, eqn: compat.JaxprEqn, operands: list[Values]) -> list[Values]:
    asks, does = compat.control_bodies(eqn)
    first, second = eqn.params["cond_nconsts"], eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
    for_asking, for_doing = operands[:first], operands[first:second]

    def known(some: Devices, goes_on: bool, values: list[Values]) -> list[Values]:
        asking, doing, carry = values[:first], values[first:second], values[second:]
        if not goes_on:
            return carry
        while True:
            carry = some.run(does, [*doing, *carry])
            answers = _answers(some, asking, carry)
            if not all(answers):
                return some.apart(answers, [*asking, *doing, *carry], known)

    def _answers(some: Devices, asking: list[Values], carry: list[Values]) -> list[bool]:
        return [bool(answer) for answer in some.run(asks, [*asking, *carry])[0]]

    carry = operands[second:]
    return devices.apart(_answers(devices, for_asking, carry), [*for_asking, *for_doing, *carry], known)


def _scan(devices: Devices, eqn: compat.JaxprEqn, operands: list[Values]) -> list[Values]:
    scan = compat.scan_of(eqn)
    assert scan is not None
    consts, carry, stacks = scan.split(operands)
    made: list[list[Values]] = []
    for trip in reversed(range(scan.trips)) if scan.reverse else range(scan.trips):
        slices = [devices.each(lambda stack, trip=trip: [_at(stack, trip)], [values])[0] for values in stacks]
        results = devices.run(scan.body, [*consts, *carry, *slices])
        carry, rows = results[: scan.carries], results[scan.carries :]
        made.append(rows)
    made = made[::-1] if scan.reverse else made
    together = [
        devices.each(lambda *rows, aval=var.aval: [_stacked(rows, aval)], [rows[number] for rows in made])[0]
        for number, var in enumerate(eqn.outvars[scan.carries :])
    ]
    return [*carry, *together]


def _at(stack: Any, trip: int) -> Any:
    return Keys(stack.words[trip], stack.dtype) if isinstance(stack, Keys) else stack[trip, ...]


def _stacked(rows: Sequence[Any], aval: Any) -> Any:
    if isinstance(aval.dtype, np.dtype):
        return np.stack(rows) if rows else np.zeros(aval.shape, aval.dtype)
    words = [row.words for row in rows] if rows else jax.random.key_data(jax.numpy.empty(aval.shape, aval.dtype))
    return Keys(np.asarray(words), aval.dtype)


def _same(devices: Devices, eqn: compat.JaxprEqn, operands: list[Values]) -> list[Values]:
    return operands


# Collectives


def _over_groups(
    devices: Devices, axes: Any, values: Values, function: Callable[[Sequence[Any]], Sequence[Any]]
) -> Values:
    """`function` of what a group has, in order, gives what each of them gets."""
    results: Values = [None] * len(values)
    known: dict[tuple[int, ...], Sequence[Any]] = {}
    for group in devices.groups(axes):
        names = tuple(id(values[place]) for place in group)
        if names not in known:
            known[names] = function([values[place] for place in group])
        for place, result in zip(group, known[names], strict=True):
            results[place] = result
    return results


def _collective(function: Callable[..., Sequence[Any]]) -> Callable[..., list[Values]]:
    """Of every operand on its own: `function(eqn, parts)` gives what each of the group gets."""

    def handler(devices: Devices, eqn: compat.JaxprEqn, operands: list[Values]) -> list[Values]:
        axes = eqn.params["axes"] if "axes" in eqn.params else eqn.params["axis_name"]
        assert eqn.params.get("axis_index_groups") is None, "groups of indices"
        return [_over_groups(devices, axes, values, lambda parts: function(eqn, parts)) for values in operands]

    return handler


def _reduction(ufunc: np.ufunc) -> Callable[..., list[Values]]:
    def function(eqn: compat.JaxprEqn, parts: Sequence[Any]) -> Sequence[Any]:
        return [_reduced(ufunc, parts)] * len(parts)

    return _collective(function)


def _reduced(ufunc: np.ufunc, parts: Sequence[Any]) -> Any:
    result = functools.reduce(ufunc, [wide(part) for part in parts])
    return np.asarray(result).astype(parts[0].dtype, copy=False)


def _all_gather(eqn: compat.JaxprEqn, parts: Sequence[Any]) -> Sequence[Any]:
    dim = eqn.params["all_gather_dimension"]
    join = np.concatenate if eqn.params["tiled"] else np.stack
    return [_of_plain(lambda plain: join(plain, dim), parts)] * len(parts)


def _reduce_scatter(eqn: compat.JaxprEqn, parts: Sequence[Any]) -> Sequence[Any]:
    dim, whole = eqn.params["scatter_dimension"], _reduced(np.add, parts)
    if eqn.params["tiled"]:
        return np.split(whole, len(parts), dim)
    return [part[...] for part in np.moveaxis(whole, dim, 0)]


def _all_to_all(eqn: compat.JaxprEqn, parts: Sequence[Any]) -> Sequence[Any]:
    """Always as if tiled: jax adds and removes a dimension around it where it is not."""
    split, concat = eqn.params["split_axis"], eqn.params["concat_axis"]

    def received(place: int) -> Callable[[Sequence[Any]], Any]:
        return lambda plain: np.concatenate([np.split(part, len(plain), split)[place] for part in plain], concat)

    return [_of_plain(received(place), parts) for place in range(len(parts))]


def _ppermute(eqn: compat.JaxprEqn, parts: Sequence[Any]) -> Sequence[Any]:
    """Who is sent nothing has zeros."""
    sources = {to: source for source, to in eqn.params["perm"]}
    return [parts[sources[place]] if place in sources else _zeros(parts[0]) for place in range(len(parts))]


def _zeros(value: Any) -> Any:
    return Keys(np.zeros_like(value.words), value.dtype) if isinstance(value, Keys) else np.zeros_like(value)


def _from_one(eqn: compat.JaxprEqn, parts: Sequence[Any]) -> Sequence[Any]:
    return [parts[eqn.params["source"]]] * len(parts)


def _of_plain(function: Callable[[Sequence[Any]], Any], parts: Sequence[Any]) -> Any:
    """Of the packed keys, where the parts are keys."""
    if not isinstance(parts[0], Keys):
        return function(parts)
    return Keys.unpacked(function([part.packed for part in parts]), parts[0].dtype)


def _axis_index(devices: Devices, eqn: compat.JaxprEqn, operands: list[Values]) -> list[Values]:
    """One object for every index, so that devices with the same share what they compute from it."""
    made = [np.asarray(index, np.int32) for index in range(devices.sizes[eqn.params["axis_name"]])]
    return [[made[index] for index in devices.index(eqn.params["axis_name"])]]


CALLS = "jit pjit closed_call core_call eval_jaxpr composite custom_jvp_call custom_vjp_call remat remat2 checkpoint"
IDENTITIES = (
    "copy copy_p device_put layout_constraint name optimization_barrier pvary reshard sharding_constraint stop_gradient"
)

HANDLERS: dict[str, Callable[[Devices, compat.JaxprEqn, list[Values]], list[Values]]] = {
    **dict.fromkeys(CALLS.split(), _called),
    **dict.fromkeys(IDENTITIES.split(), _same),
    "cond": _cond,
    "scan": _scan,
    "while": _while,
    "all_gather": _collective(_all_gather),
    "all_gather_invariant": _collective(_all_gather),
    "all_to_all": _collective(_all_to_all),
    "axis_index": _axis_index,
    "pbroadcast": _collective(_from_one),
    "pmax": _reduction(np.maximum),
    "pmin": _reduction(np.minimum),
    "ppermute": _collective(_ppermute),
    "psum": _reduction(np.add),
    "psum_invariant": _reduction(np.add),
    "reduce_scatter": _collective(_reduce_scatter),
}
