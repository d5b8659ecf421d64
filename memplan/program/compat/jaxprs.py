"""Jaxprs and their equations: read them, rewrite them, evaluate one equation."""

import contextlib
import itertools
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np
from jax._src import config as _config
from jax._src import core as _core
from jax._src import source_info_util as _source
from jax._src.interpreters import partial_eval as _pe
from jax._src.state import discharge as _discharge
from jax._src.state.types import AbstractRef
from jax.interpreters import mlir

ClosedJaxpr = jex.Jaxpr  # since 0.11, one class for open and closed jaxprs
JaxprEqn = jex.JaxprEqn
Literal = jex.Literal
Var = jex.Var
DropVar = jex.DropVar
jaxpr_as_fun = jex.jaxpr_as_fun

PINNED = "pinned_host"
"""jax's memory kind for host memory that a GPU can read and write."""
_INSTALLED = re.compile(r"[\\/](site|dist)-packages[\\/]")
_OWN = str(Path(__file__).parents[2]) + os.sep


def consts_of(closed: ClosedJaxpr) -> list[tuple[Var, Any]]:
    """Constant variables with their values."""
    return list(zip(closed.jaxpr.constvars, closed.consts, strict=True))


def input_names(closed: ClosedJaxpr) -> tuple[str, ...]:
    """One readable path per input, as jax names them: `state.params['w']`."""
    names = closed.jaxpr.debug_info.arg_names or ()
    if len(names) != len(closed.jaxpr.invars):  # jax does not promise them
        names = [None] * len(closed.jaxpr.invars)
    return tuple(name or f"args[{number}]" for number, name in enumerate(names))


def output_names(closed: ClosedJaxpr) -> tuple[str, ...]:
    """One readable path per output, as jax names them: `result[1]['logits']`."""
    names: Any = closed.jaxpr.debug_info.resolve_result_paths().result_paths
    count = len(closed.jaxpr.outvars)
    return (
        names
        if names
        and len(
            names,
        )
        == count
        else tuple(f"result[{number}]" for number in range(count))
    )


def source_of(eqn: JaxprEqn) -> str:
    """`file:line` of the user's code that made this equation, or '' where jax did.

    Frames of a library between jax and the user (flax, optax) are skipped, unless there are no
    others.
    """
    frames = _source.user_frames(eqn.source_info.traceback)
    file, line = users_line([(frame.file_name, str(frame.start_line)) for frame in frames])
    return f"{file}:{line}" if file else ""


def nearest_source(eqn: JaxprEqn, caller: JaxprEqn | None) -> JaxprEqn:
    """The equation, or its caller if only the caller has a line of the user's code, or any line.

    For a function that jax traces on its own, such as a loop's body, jax records only the lines
    inside the function.

    Args:
      caller: the equation that calls the function in which `eqn` stands.
    """
    if caller is None:
        return eqn
    inner, outer = source_of(eqn), source_of(caller)
    is_better = outer and (not inner or (is_installed(inner) and not is_installed(outer)))
    return caller if is_better else eqn


def is_installed(file_name: str) -> bool:
    """True for a file of an installed library, False for the user's own."""
    return _INSTALLED.search(file_name) is not None


def users_line(frames: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """The innermost frame of the user's code, else the innermost of a library, else ('', '').

    Frames of memplan are skipped. Frames outside of memplan's called memplan, not the step, so they
    count only if there are none inside.

    Args:
      frames: (file, line), the innermost first.
    """
    inside = list(itertools.takewhile(lambda frame: not frame[0].startswith(_OWN), frames))
    candidates = inside or [frame for frame in frames if not frame[0].startswith(_OWN)]
    users_own = [frame for frame in candidates if not is_installed(frame[0])]
    return next(iter(users_own or candidates), ("", ""))


def relative(source: str) -> str:
    """The source, relative to the working directory if it lies below it."""
    working_directory = os.getcwd() + os.sep
    return source[len(working_directory) :] if source.startswith(working_directory) else source


@contextlib.contextmanager
def user_context(eqn: JaxprEqn, caller: JaxprEqn | None = None) -> Iterator[None]:
    """Inside the block, jax gives new equations this equation's name stack, context and source.

    Args:
      caller: see `nearest_source`.
    """
    stack = _source.current_name_stack() + eqn.source_info.name_stack
    traceback = nearest_source(eqn, caller).source_info.traceback
    with _source.user_context(traceback, name_stack=stack), _mesh_of(eqn):
        yield


def source_context(eqn: JaxprEqn) -> contextlib.AbstractContextManager[None]:
    """Inside the block, jax gives new equations the source of this equation."""
    return _source.user_context(eqn.source_info.traceback, name_stack=_source.current_name_stack())


@contextlib.contextmanager
def _mesh_of(eqn: JaxprEqn) -> Iterator[None]:
    """The equation's context, but with the surrounding mesh if there is one.

    The equation may be written again over other devices than it was traced for. If there is no
    surrounding mesh, the context has the axes that a collective of this equation may name.
    """
    surrounding = jax.sharding.get_abstract_mesh()
    mesh = eqn.ctx.cur_abstract_mesh
    with contextlib.ExitStack() as stack:
        stack.enter_context(eqn.ctx.manager)
        if surrounding.manual_axes:
            stack.enter_context(jax.sharding.use_abstract_mesh(surrounding))
        elif mesh.manual_axes:
            names = [name for name in mesh.axis_names if name in mesh.manual_axes]
            axes = [(name, mesh.shape[name]) for name in names]
            stack.enter_context(_core.extend_axis_env_nd(axes))
        yield


def read(env: Mapping[Any, Any], atom: Any) -> Any:
    """The value of a variable or literal while a jaxpr is evaluated.

    A literal array that was written inside a `shard_map` has its mesh; as a numpy array it fits
    any.
    """
    if not isinstance(atom, Literal):
        return env[atom]
    return np.asarray(atom.val) if is_manual(atom.aval) else atom.val


def is_var(atom: Any) -> bool:
    """True for a variable, False for a literal."""
    return not isinstance(atom, Literal)


def value_of(literal: Any) -> Any:
    """The value of a literal (jax's stubs give variables and literals one type)."""
    return literal.val


def aval_of(atom: Any) -> Any:
    """The type of a variable or literal (jax's stubs declare a class without shape and dtype)."""
    return atom.aval


def bind(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """Apply the equation's primitive to operands; returns a list even for a single result."""
    out = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(_on_any_mesh(eqn.params)))
    return list(out) if eqn.primitive.multiple_results else [out]


def _on_any_mesh(params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters without the mesh of a surrounding `shard_map`.

    Inside a `shard_map`, a result's sharding says only the mesh, and the equation may be written
    again over another one.
    """
    sharding = params.get("sharding")
    inside = isinstance(sharding, jax.sharding.NamedSharding) and bool(sharding.mesh.manual_axes)
    return {**params, "sharding": None} if inside else dict(params)


def call_body(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The body of an equation that only calls it and can be inlined; None for other equations.

    A nested jit may place its operands and results on a mesh (`constraints_of`).
    """
    name = eqn.primitive.name
    if name == "jit" or name == "pjit":
        operands, results = constraints_of(eqn)
        layouts = [*eqn.params["in_layouts"], *eqn.params["out_layouts"]]
        is_call = all(map(_is_constraint, [*operands, *results])) and not any(layouts)
        return eqn.params["jaxpr"] if is_call else None
    if name in ("custom_jvp_call", "custom_vjp_call", "closed_call", "core_call"):
        return eqn.params.get("call_jaxpr")
    if name in ("remat2", "checkpoint", "remat"):
        return eqn.params["jaxpr"]
    return None


def constraints_of(eqn: JaxprEqn) -> tuple[list[Any], list[Any]]:
    """The shardings that a call, or a `shard_map`, gives its operands and its results.

    They are None where it gives none.
    """
    if is_shard_map(eqn):
        mesh = eqn.params["mesh"]
        operands, results = (
            [jax.sharding.NamedSharding(mesh, spec) for spec in eqn.params[name]]
            for name in ("in_specs", "out_specs")
        )
        return operands, results
    names = ("in_shardings", "out_shardings")
    atoms = (eqn.invars, eqn.outvars)
    shardings = [
        eqn.params.get(name, [None] * len(part)) for name, part in zip(names, atoms, strict=True)
    ]
    operands, results = (
        [sharding if isinstance(sharding, jax.sharding.Sharding) else None for sharding in part]
        for part in shardings
    )
    return operands, results


def _is_constraint(sharding: Any) -> bool:
    """Can a sharding of a call be a constraint in the caller, or is there none?"""
    if sharding is None:
        return True
    is_named = isinstance(sharding, jax.sharding.NamedSharding)
    return is_named and not sharding.mesh.explicit_axes and sharding.memory_kind != PINNED


def constrained(arrays: Sequence[Any], shardings: Sequence[Any]) -> list[Any]:
    """The arrays with constraints to these shardings, except where there is none."""
    return [
        array if sharding is None else jax.lax.with_sharding_constraint(array, sharding)
        for array, sharding in zip(arrays, shardings, strict=True)
    ]


def divided_dims(sharding: Any, rank: int) -> tuple[int, ...]:
    """The dimensions that a sharding divides; all of them if it is no NamedSharding."""
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return tuple(range(rank))
    return tuple(dim for dim, axes in enumerate(sharding.spec) if axes not in (None, ()))


def part_nbytes(aval: Any, sharding: Any) -> int:
    """Bytes that one device has of an array with this sharding; None means undivided."""
    if sharding is None or not getattr(aval, "size", 0):
        return nbytes_of(aval)
    return nbytes_of(aval) * math.prod(sharding.shard_shape(aval.shape)) // math.prod(aval.shape)


def needs_barrier(eqn: JaxprEqn) -> bool:
    """True for a differentiated `jax.checkpoint`, which jax lowers behind a barrier against CSE."""
    return bool(eqn.params.get("differentiated")) and bool(eqn.params.get("prevent_cse"))


EMPTY = ("empty", "empty2")
"""jax's primitives of uninitialized arrays."""
REMATTED = "rematted_computation"
"""jax's scope for what a differentiated `jax.checkpoint` computes again."""


def recomputes(eqn: JaxprEqn) -> bool:
    """Does a `jax.checkpoint` of the step run this equation, or its body, for the second time?"""
    return bool(eqn.params.get("differentiated")) or REMATTED in scope_of(eqn)


def scope_of(eqn: JaxprEqn) -> str:
    """The equation's name stack, as `jvp(UNet)/down_0`."""
    return str(eqn.source_info.name_stack)


def in_scope(eqn: JaxprEqn, scope: str) -> JaxprEqn:
    """The equation in one more scope of its name stack."""
    info = eqn.source_info
    return eqn.replace(source_info=info.replace(name_stack=info.name_stack.extend(scope)))


@dataclass(frozen=True)
class Scan:
    """A `lax.scan`: its operands are constants, carries, stacks; its results carries, stacks."""

    body: ClosedJaxpr
    consts: int  # number of constants
    carries: int  # number of carried values
    trips: int  # its length
    reverse: bool
    unroll: int

    @property
    def following(self) -> Any:
        """For each trip, the index of the next trip's slice; the last trip has its own."""
        trips = jax.numpy.arange(self.trips)
        if self.reverse:
            return jax.numpy.maximum(trips - 1, 0)
        return jax.numpy.minimum(trips + 1, self.trips - 1)

    def split(self, operands: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Split operands (or inputs of the body): constants, carries, stacks (or slices)."""
        first = self.consts + self.carries
        return (
            list(operands[: self.consts]),
            list(operands[self.consts : first]),
            list(operands[first:]),
        )

    def run(self, body: Callable[..., Sequence[Any]], operands: Sequence[Any]) -> list[Any]:
        """Run the loop with another body of the same signature, on the equation's operands."""
        consts, carries, stacks = self.split(operands)

        def trip(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
            results = list(body(*consts, *carry, *slices))
            return results[: self.carries], results[self.carries :]

        carried, stacked = self.loop(trip, carries, stacks)
        return [*carried, *stacked]

    def loop(self, trip: Callable[..., Any], carry: Any, xs: Any) -> tuple[Any, Any]:
        """`lax.scan` with the length, direction and unrolling of this loop."""
        options = {"length": self.trips, "reverse": self.reverse, "unroll": self.unroll}
        return jax.lax.scan(trip, carry, xs, **options)


def scan_of(eqn: JaxprEqn) -> Scan | None:
    """The equation as a `Scan`; None if it is no `lax.scan`."""
    if eqn.primitive.name != "scan":
        return None
    params = eqn.params
    consts, carries, _ = (len(list(part)) for part in params["ft_in"].unpack())
    return Scan(
        params["jaxpr"],
        consts,
        carries,
        params["length"],
        params["reverse"],
        params["unroll"],
    )


def as_scan(eqn: JaxprEqn) -> Scan:
    """A `lax.scan` as a `Scan`."""
    scan = scan_of(eqn)
    assert scan is not None
    return scan


@dataclass(frozen=True)
class InnerJaxpr:
    """A branch of a `lax.cond`, or the body of a loop."""

    body: ClosedJaxpr
    # the equation's operands, one for each input of the body; a trip of a scan gets slices of its
    # stacks
    operands: Sequence[Any]
    trips: int  # how often it runs; 1 if that is unknown
    sliced_nbytes: int  # bytes of the slices that a trip reads and makes
    carried: Sequence[int] = ()  # positions of the body's inputs that a loop carries


def computations_of(eqn: JaxprEqn) -> list[InnerJaxpr]:
    """The branches or the loop body of an equation; none for an equation that only calls."""
    params = eqn.params
    operands = list(eqn.invars)
    match eqn.primitive.name:
        case "cond":
            return [InnerJaxpr(branch, operands[1:], 1, 0) for branch in params["branches"]]
        case "while":
            body = params["body_jaxpr"]
            carried = range(params["body_nconsts"], len(body.jaxpr.invars))
            return [InnerJaxpr(body, operands[params["cond_nconsts"] :], 1, 0, carried)]
        case "scan":
            scan = as_scan(eqn)
            body = params["jaxpr"]
            carried = range(scan.consts, scan.consts + scan.carries)
            slices = [*scan.split(body.jaxpr.invars)[2], *body.jaxpr.outvars[scan.carries :]]
            sliced_nbytes = sum(nbytes_of(aval_of(atom)) for atom in slices)
            return [InnerJaxpr(body, operands, scan.trips, sliced_nbytes, carried)]
    return []


def bodies_of(eqn: JaxprEqn) -> list[InnerJaxpr]:
    """Its `computations_of`, or the body of a `shard_map`, which XLA inlines."""
    if is_shard_map(eqn):
        return [InnerJaxpr(eqn.params["jaxpr"], eqn.invars, 1, 0)]
    return computations_of(eqn)


def is_shard_map(eqn: JaxprEqn) -> bool:
    """Does it run its body on every device of a mesh, on that device's parts of its operands?"""
    return eqn.primitive.name == "shard_map"


@contextlib.contextmanager
def inside(eqn: JaxprEqn) -> Iterator[None]:
    """Inside the block, jax traces as in the body of a `shard_map`; no change for others."""
    if not is_shard_map(eqn):
        yield
        return
    manual = manual_axes(eqn)
    mesh = eqn.params["mesh"].abstract_mesh
    types = dict.fromkeys(manual, jax.sharding.AxisType.Manual)
    surrounding = jax.sharding.get_abstract_mesh()
    outer = surrounding if surrounding.manual_axes else mesh
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.sharding.use_abstract_mesh(outer.update_axis_types(types)))
        stack.enter_context(_core.extend_axis_env_nd([(name, mesh.shape[name]) for name in manual]))
        stack.enter_context(_config._check_vma(eqn.params["check_vma"]))
        yield


def manual_axes(eqn: JaxprEqn) -> tuple[str, ...]:
    """The mesh axes over which a `shard_map` runs its body, in the mesh's order."""
    axes = eqn.params["newly_manual_axes"]
    return tuple(name for name in eqn.params["mesh"].axis_names if name in axes)


def automatic_axes(shard_maps: Sequence[JaxprEqn]) -> tuple[str, ...]:
    """The mesh axes over which XLA itself divides what is inside of `shard_map`s.

    Args:
      shard_maps: each inside of the one before.
    """
    if not shard_maps:
        return ()
    manual = {axis for eqn in shard_maps for axis in manual_axes(eqn)}
    sizes = shard_maps[-1].params["mesh"].shape
    return tuple(axis for axis, size in sizes.items() if size > 1 and axis not in manual)


def communicates(eqn: JaxprEqn) -> bool:
    """Does the equation, or one in its bodies, read other devices' values inside a `shard_map`?"""
    inner = itertools.chain.from_iterable(jaxpr.eqns for jaxpr in sub_jaxprs(eqn))
    return "axis_name" in eqn.params or any(map(communicates, inner))


def varying_axes(aval: Any) -> frozenset[str]:
    """The axes of a `shard_map` along which devices have different values of this type."""
    return aval.mat.varying


def with_computation(eqn: JaxprEqn, index: int, body: ClosedJaxpr) -> JaxprEqn:
    """The equation with another jaxpr for one of its `bodies_of`."""
    params = eqn.params
    match eqn.primitive.name:
        case "cond":
            branches = [*params["branches"]]
            branches[index] = body
            changed = {"branches": tuple(branches)}
        case "while":
            changed = {"body_jaxpr": body}
        case "shard_map":
            changed = {"jaxpr": _with_literals(body)}
        case _:
            changed = {"jaxpr": body}
    return eqn.replace(params={**params, **changed})


def _with_literals(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The jaxpr with literals in place of constants, which a `shard_map`'s body may not have."""
    literals = {var: Literal(np.asarray(value), var.aval) for var, value in consts_of(closed)}

    def literal(atom: Any) -> Any:
        return literals.get(atom, atom) if is_var(atom) else atom

    jaxpr = closed.jaxpr
    eqns = [eqn.replace(invars=[*map(literal, eqn.invars)]) for eqn in jaxpr.eqns]
    outvars = [*map(literal, jaxpr.outvars)]
    return jex.Jaxpr(jaxpr.replace(constvars=[], eqns=eqns, outvars=outvars), [])


def sub_jaxprs(eqn: JaxprEqn) -> list[Any]:
    """Every jaxpr in the equation's parameters (loop bodies, branches)."""
    return list(_core.jaxprs_in_params(eqn.params))


def with_jaxprs(eqn: JaxprEqn, jaxprs: Sequence[Any]) -> JaxprEqn:
    """The equation with other `sub_jaxprs`, in the same order."""
    if not jaxprs:
        return eqn
    replacements = iter(jaxprs)

    def changed(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(changed, value))
        return next(replacements) if isinstance(value, jex.Jaxpr) else value

    return eqn.replace(params={name: changed(value) for name, value in eqn.params.items()})


def as_struct(aval: Any) -> Any:
    """A ShapeDtypeStruct with weak type to trace with.

    An array in host memory, or inside a `shard_map`, keeps its aval.
    """
    if getattr(aval, "memory_space", None) == jax.memory.Space.Host or is_manual(aval):
        return aval
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def is_manual(aval: Any) -> bool:
    """Is it the type of a value inside a `shard_map`?"""
    sharding = getattr(aval, "sharding", None)
    return sharding is not None and bool(sharding.mesh.manual_axes)


def structs_of(atoms: Iterable[Any]) -> list[Any]:
    """The types of variables or literals to trace with (`as_struct`)."""
    return [as_struct(atom.aval) for atom in atoms]


def nbytes_of(aval: Any) -> int:
    """Bytes of a dense array of this type; a key array counts its words, a token or reference 0."""
    if not hasattr(aval, "shape") or not hasattr(aval, "dtype"):
        return 0
    dtype = aval.dtype
    if jax.numpy.issubdtype(dtype, jax.dtypes.extended):
        return nbytes_of(_core.physical_aval(aval))
    if dtype == jax.dtypes.float0:
        return 0
    return (math.prod(aval.shape) * jax.dtypes.itemsize_bits(dtype) + 7) // 8


def is_on_host(atom: Any) -> bool:
    """True for an array that the step put into host memory (`jax.memory.Space.Host`)."""
    return getattr(atom.aval, "memory_space", None) == jax.memory.Space.Host


def is_reference(atom: Any) -> bool:
    """True for a mutable array."""
    return isinstance(atom.aval, AbstractRef)


def discharge_references(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Replace the mutable arrays that the jaxpr makes (`jax.new_ref`) by values.

    Every write makes a new value.
    """
    refs = [var for eqn in closed.jaxpr.eqns for var in eqn.outvars if is_reference(var)]
    return _discharge.discharge_state(closed) if refs else closed


def dce(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Remove equations that neither results nor effects depend on; all inputs stay."""
    jaxpr, _ = _pe.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    return jex.Jaxpr(jaxpr, closed.consts)


def read_inputs(closed: ClosedJaxpr) -> list[bool]:
    """Does any result or effect depend on each input?"""
    jaxpr = closed.jaxpr
    return list(_pe.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=False)[1])


def with_eqns(
    closed: ClosedJaxpr,
    eqns: Sequence[JaxprEqn],
    constants: Mapping[Var, Any] | None = None,
) -> ClosedJaxpr:
    """The jaxpr with other equations, and with additional constants that they read."""
    jaxpr = closed.jaxpr
    new_constants = constants or {}
    constvars = [*jaxpr.constvars, *new_constants]
    consts = [*closed.consts, *new_constants.values()]
    return jex.Jaxpr(jaxpr.replace(eqns=list(eqns), constvars=constvars), consts)


def with_results(closed: ClosedJaxpr, atoms: Sequence[Any]) -> ClosedJaxpr:
    """The jaxpr with other results."""
    info = closed.jaxpr.debug_info.with_unknown_names()
    return jex.Jaxpr(closed.jaxpr.replace(outvars=list(atoms), debug_info=info), closed.consts)


def joined(
    bodies: Sequence[ClosedJaxpr],
    inputs: Iterable[Any],
    results: Iterable[Any],
    eqns: Sequence[JaxprEqn],
) -> ClosedJaxpr:
    """One jaxpr of equations of several, with the constants of all."""
    constants = {var: value for body in bodies for var, value in consts_of(body)}
    jaxpr = bodies[0].jaxpr.replace(
        constvars=list(constants),
        invars=list(inputs),
        outvars=list(results),
        eqns=list(eqns),
        effects=_core.join_effects(*(body.jaxpr.effects for body in bodies)),
        debug_info=bodies[0].jaxpr.debug_info.with_unknown_names(),
    )
    return jex.Jaxpr(jaxpr, list(constants.values()))


def with_bodies(
    eqn: JaxprEqn,
    bodies: Sequence[ClosedJaxpr],
    in_specs: Sequence[Any] = (),
    out_specs: Sequence[Any] = (),
) -> JaxprEqn:
    """A conditional or `shard_map` with other `bodies_of`.

    Args:
      in_specs, out_specs: of a `shard_map`.
    """
    if eqn.primitive.name == "cond":
        changed: dict[str, Any] = {"branches": tuple(bodies)}
    else:
        specs = {"in_specs": tuple(in_specs), "out_specs": tuple(out_specs)}
        changed = {"jaxpr": bodies[0], **specs}
    return eqn.replace(params={**eqn.params, **changed})


def new_primitive(name: str, function: Callable[..., Any]) -> jex.Primitive:
    """A primitive with the result, the type and the lowering of a jax function of one result."""

    def typed(*avals: Any, **params: Any) -> Any:
        result = jax.eval_shape(lambda *operands: function(*operands, **params), *avals)
        return avals[0].update(shape=result.shape, dtype=result.dtype, weak_type=False)

    primitive = jex.Primitive(name)
    primitive.def_impl(function)
    primitive.def_abstract_eval(typed)
    mlir.register_lowering(primitive, mlir.lower_fun(function, multiple_results=False))
    return primitive
