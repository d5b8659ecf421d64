"""Jaxprs and their equations: what stands in them, and evaluating one equation."""

import contextlib
import itertools
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np
from jax._src import core as _core
from jax._src import source_info_util as _source
from jax._src.interpreters import partial_eval as _pe
from jax._src.state import discharge as _discharge
from jax._src.state.types import AbstractRef
from jax.interpreters import mlir

ClosedJaxpr = jex.Jaxpr  # one since 0.11
JaxprEqn = jex.JaxprEqn
Literal = jex.Literal
Var = jex.Var
DropVar = jex.DropVar
jaxpr_as_fun = jex.jaxpr_as_fun

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
    return names if names and len(names) == count else tuple(f"result[{number}]" for number in range(count))


def source_of(eqn: JaxprEqn) -> str:
    """`file:line` of the user's code that made this equation, or '' where jax did.

    A library between jax and the user (flax, optax) is passed over, unless nothing else called it.
    """
    frames = _source.user_frames(eqn.source_info.traceback)
    file, line = users_line([(frame.file_name, str(frame.start_line)) for frame in frames])
    return f"{file}:{line}" if file else ""


def nearest_source(eqn: JaxprEqn, caller: JaxprEqn | None) -> JaxprEqn:
    """The equation, or the one that calls its function if that alone has a line of the user's own, or of anyone's.

    jax tells of equations inside of a function that it traces by itself, such as a loop's body, only the lines inside.
    """
    if caller is None:
        return eqn
    inner, outer = source_of(eqn), source_of(caller)
    is_better = outer and (not inner or (is_installed(inner) and not is_installed(outer)))
    return caller if is_better else eqn


def is_installed(file_name: str) -> bool:
    """A library's, and not the user's own."""
    return _INSTALLED.search(file_name) is not None


def users_line(frames: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """Of files and lines, the innermost first: the user's innermost, else the innermost of a library, else ('', '').

    memplan's own are never told, and what is around them only if nothing is within: it called memplan, not the step.
    """
    within = list(itertools.takewhile(lambda frame: not frame[0].startswith(_OWN), frames))
    within = within or [frame for frame in frames if not frame[0].startswith(_OWN)]
    own = [frame for frame in within if not is_installed(frame[0])]
    return next(iter(own or within), ("", ""))


def relative(source: str) -> str:
    """Paths below the working directory are shown relative to it."""
    here = os.getcwd() + os.sep
    return source[len(here) :] if source.startswith(here) else source


@contextlib.contextmanager
def user_context(eqn: JaxprEqn, caller: JaxprEqn | None = None) -> Iterator[None]:
    """Bind in the equation's own name stack and context, and in its own source or that of its caller."""
    stack = _source.current_name_stack() + eqn.source_info.name_stack
    traceback = nearest_source(eqn, caller).source_info.traceback
    with _source.user_context(traceback, name_stack=stack), _mesh_of(eqn):
        yield


def source_context(eqn: JaxprEqn) -> contextlib.AbstractContextManager[None]:
    """Bind in the equation's source."""
    return _source.user_context(eqn.source_info.traceback, name_stack=_source.current_name_stack())


@contextlib.contextmanager
def _mesh_of(eqn: JaxprEqn) -> Iterator[None]:
    """The equation's context, with the mesh that is there already: it may be written again over other devices.

    Outside of any, the axes that a collective of this equation may name.
    """
    here, mesh = jax.sharding.get_abstract_mesh(), eqn.ctx.cur_abstract_mesh
    with contextlib.ExitStack() as stack:
        stack.enter_context(eqn.ctx.manager)
        if here.manual_axes:
            stack.enter_context(jax.sharding.use_abstract_mesh(here))
        elif mesh.manual_axes:
            axes = [(name, mesh.shape[name]) for name in mesh.axis_names if name in mesh.manual_axes]
            stack.enter_context(_core.extend_axis_env_nd(axes))
        yield


def read(env: Mapping[Any, Any], atom: Any) -> Any:
    """The value of a variable or literal while a jaxpr is evaluated.

    A literal array that was written inside a `shard_map` remembers the mesh; as a plain one it fits any.
    """
    if not isinstance(atom, Literal):
        return env[atom]
    sharding = getattr(atom.aval, "sharding", None)
    return np.asarray(atom.val) if sharding is not None and sharding.mesh.manual_axes else atom.val


def is_var(atom: Any) -> bool:
    """True for a variable, False for a literal."""
    return not isinstance(atom, Literal)


def value_of(literal: Any) -> Any:
    """The value of a literal; jax's stubs give variables and literals one type."""
    return literal.val


def aval_of(atom: Any) -> Any:
    """The type of a variable or literal; jax's stubs give its base class, which knows neither shape nor dtype."""
    return atom.aval


def bind(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """Apply the equation's primitive to operands; always a list of results."""
    out = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(_on_any_mesh(eqn.params)))
    return list(out) if eqn.primitive.multiple_results else [out]


def _on_any_mesh(params: Mapping[str, Any]) -> dict[str, Any]:
    """Inside a `shard_map` the sharding of a result is its mesh alone: that of whatever mesh it is written over."""
    sharding = params.get("sharding")
    inside = isinstance(sharding, jax.sharding.NamedSharding) and bool(sharding.mesh.manual_axes)
    return {**params, "sharding": None} if inside else dict(params)


def call_body(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The body of an equation that merely calls it, so that it can be inlined; None for any other equation.

    A nested jit with shardings of its own, and anything with several bodies, is not merely a call.
    """
    name = eqn.primitive.name
    if name == "jit" or name == "pjit":
        specified = [*eqn.params["in_shardings"], *eqn.params["out_shardings"]]
        if any(isinstance(sharding, jax.sharding.Sharding) for sharding in specified):
            return None
        return eqn.params["jaxpr"]
    if name in ("custom_jvp_call", "custom_vjp_call", "closed_call", "core_call"):
        return eqn.params.get("call_jaxpr")
    if name in ("remat2", "checkpoint", "remat"):
        return eqn.params["jaxpr"]
    return None


def divided_dims(sharding: Any, rank: int) -> tuple[int, ...]:
    """The dimensions that a sharding divides; all for one that is not by the axes of a mesh."""
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return tuple(range(rank))
    return tuple(dim for dim, axes in enumerate(sharding.spec) if axes not in (None, ()))


def part_nbytes(aval: Any, sharding: Any) -> int:
    """Bytes that one device has of an array with this sharding; None is none."""
    if sharding is None or not getattr(aval, "size", 0):
        return nbytes_of(aval)
    return nbytes_of(aval) * math.prod(sharding.shard_shape(aval.shape)) // math.prod(aval.shape)


def needs_barrier(eqn: JaxprEqn) -> bool:
    """True for a differentiated `jax.checkpoint`, which jax lowers behind a barrier against CSE."""
    return bool(eqn.params.get("differentiated")) and bool(eqn.params.get("prevent_cse"))


REMATTED = "rematted_computation"
"""jax's scope for what a differentiated `jax.checkpoint` computes again."""


def recomputes(eqn: JaxprEqn) -> bool:
    """Does a `jax.checkpoint` of the step run this equation, or all in it, for the second time?"""
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
    # consts, carries: how many
    consts: int
    carries: int
    trips: int  # its length
    reverse: bool
    unroll: int

    @property
    def following(self) -> Any:
        """Per trip, the slice of the trip that comes after it; the last one has its own."""
        trips = jax.numpy.arange(self.trips)
        return jax.numpy.maximum(trips - 1, 0) if self.reverse else jax.numpy.minimum(trips + 1, self.trips - 1)

    def split(self, operands: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Operands of the equation, or inputs of the body: constants, carries, and stacks or their slices."""
        first = self.consts + self.carries
        return list(operands[: self.consts]), list(operands[self.consts : first]), list(operands[first:])

    def run(self, body: Callable[..., Sequence[Any]], operands: Sequence[Any]) -> list[Any]:
        """The loop with another flat body of the same signature; operands and results as of the equation."""
        consts, carries, stacks = self.split(operands)

        def trip(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
            results = list(body(*consts, *carry, *slices))
            return results[: self.carries], results[self.carries :]

        carried, made = jax.lax.scan(trip, carries, stacks, length=self.trips, reverse=self.reverse, unroll=self.unroll)
        return [*carried, *made]


def scan_of(eqn: JaxprEqn) -> Scan | None:
    """The scan that an equation is; None if it is no `lax.scan`."""
    if eqn.primitive.name != "scan":
        return None
    params = eqn.params
    consts, carries, _ = (len(list(part)) for part in params["ft_in"].unpack())
    return Scan(params["jaxpr"], consts, carries, params["length"], params["reverse"], params["unroll"])


@dataclass(frozen=True)
class Computation:
    """A branch of a `lax.cond`, or the body of a loop."""

    body: ClosedJaxpr
    operands: Sequence[Any]  # of the equation, for the inputs of the body; of a stack it gets a slice
    trips: int  # how often it runs, as far as that is known
    sliced_nbytes: int  # of the slices that a trip reads and makes
    carried: Sequence[int] = ()  # positions of a body's inputs that the next trip has from this one


def computations_of(eqn: JaxprEqn) -> list[Computation]:
    """The computations that an equation runs by choice or repeatedly; none for one that merely calls."""
    params, operands = eqn.params, list(eqn.invars)
    match eqn.primitive.name:
        case "cond":
            return [Computation(branch, operands[1:], 1, 0) for branch in params["branches"]]
        case "while":
            body = params["body_jaxpr"]
            carried = range(params["body_nconsts"], len(body.jaxpr.invars))
            return [Computation(body, operands[params["cond_nconsts"] :], 1, 0, carried)]
        case "scan":
            scan, body = scan_of(eqn), params["jaxpr"]
            assert scan is not None
            carried = range(scan.consts, scan.consts + scan.carries)
            slices = [*scan.split(body.jaxpr.invars)[2], *body.jaxpr.outvars[scan.carries :]]
            return [Computation(body, operands, scan.trips, sum(nbytes_of(aval_of(one)) for one in slices), carried)]
    return []


def with_computation(eqn: JaxprEqn, index: int, body: ClosedJaxpr) -> JaxprEqn:
    """The equation with another jaxpr for one of its computations."""
    params = eqn.params
    match eqn.primitive.name:
        case "cond":
            branches = [*params["branches"]]
            branches[index] = body
            changed = {"branches": tuple(branches)}
        case "while":
            changed = {"body_jaxpr": body}
        case _:
            changed = {"jaxpr": body}
    return eqn.replace(params={**params, **changed})


def sub_jaxprs(eqn: JaxprEqn) -> list[Any]:
    """Every jaxpr in the equation's parameters (loop bodies, branches)."""
    return list(_core.jaxprs_in_params(eqn.params))


def with_jaxprs(eqn: JaxprEqn, jaxprs: Sequence[Any]) -> JaxprEqn:
    """The equation with others in their place."""
    left = iter(jaxprs)

    def changed(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(changed, value))
        return next(left) if isinstance(value, jex.Jaxpr) else value

    return eqn.replace(params={name: changed(value) for name, value in eqn.params.items()}) if jaxprs else eqn


def as_struct(aval: Any) -> Any:
    """A shape to trace with, weak type included; in host memory, the type itself."""
    if getattr(aval, "memory_space", None) == jax.memory.Space.Host:
        return aval
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def nbytes_of(aval: Any) -> int:
    """Bytes of a dense array of this type; typed keys count their words, tokens and references nothing."""
    if not hasattr(aval, "shape") or not hasattr(aval, "dtype"):
        return 0
    dtype = aval.dtype
    if jax.numpy.issubdtype(dtype, jax.dtypes.extended):
        return nbytes_of(_core.physical_aval(aval))
    if dtype == jax.dtypes.float0:
        return 0
    return (math.prod(aval.shape) * jax.dtypes.itemsize_bits(dtype) + 7) // 8


def is_on_host(atom: Any) -> bool:
    """True for an array in host memory (`jax.device_put(x, jax.memory.Space.Host)` inside the step)."""
    return getattr(atom.aval, "memory_space", None) == jax.memory.Space.Host


def is_reference(atom: Any) -> bool:
    """True for a mutable array."""
    return isinstance(atom.aval, AbstractRef)


def discharge_references(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Mutable references made inside (`jax.new_ref`) become values, a new one at every write."""
    refs = [var for eqn in closed.jaxpr.eqns for var in eqn.outvars if is_reference(var)]
    return _discharge.discharge_state(closed) if refs else closed


def dce(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Remove equations that nothing observable depends on; inputs stay as they are."""
    jaxpr, _ = _pe.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    return jex.Jaxpr(jaxpr, closed.consts)


def with_eqns(closed: ClosedJaxpr, eqns: Sequence[JaxprEqn], constants: Mapping[Var, Any] | None = None) -> ClosedJaxpr:
    """The same with other equations, and with further constants that they read."""
    jaxpr, more = closed.jaxpr, constants or {}
    return jex.Jaxpr(
        jaxpr.replace(eqns=list(eqns), constvars=[*jaxpr.constvars, *more]), [*closed.consts, *more.values()]
    )


def new_primitive(name: str, function: Callable[..., Any]) -> jex.Primitive:
    """A primitive that computes what a function of jax computes: one array, shaped and lowered as that is."""

    def typed(*avals: Any, **params: Any) -> Any:
        made = jax.eval_shape(lambda *operands: function(*operands, **params), *avals)
        return avals[0].update(shape=made.shape, dtype=made.dtype, weak_type=False)

    made = jex.Primitive(name)
    made.def_impl(function)
    made.def_abstract_eval(typed)
    mlir.register_lowering(made, mlir.lower_fun(function, multiple_results=False))
    return made
