"""Program, arguments -> what `jax.jit` lowers."""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.core import Tracer

from memplan.errors import UnsupportedProgramError
from memplan.hardware.backend import Backend
from memplan.hardware.machine import Machine
from memplan.program import compat
from memplan.program.interpret import interpret
from memplan.program.jit_arguments import dynamic_arguments
from memplan.program.trace import Program


@dataclass(frozen=True)
class Lowerable:
    """A function, its arguments as `jax.jit` takes them, and where its inputs and outputs are."""

    step: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)  # of `jax.jit`
    on_host: Collection[int] = ()  # positions of inputs in host memory
    returned_to_host: Collection[int] = ()  # positions of outputs in host memory
    machine: Machine | None = None  # runs the partitions, if there are several


def lowerable(program: Program, backend: Backend) -> Lowerable:
    """A program with the arguments that its step was traced with.

    Args:
      backend: what compiles it.

    Raises:
      UnsupportedProgramError: jax can lower the arguments only by their leaves, but they have
        shardings.
    """
    step = program.step
    options = program.options
    jaxpr = None
    args, kwargs = program.traced.args, program.traced.kwargs
    if program.rewritten is not None:
        jaxpr = program.jaxpr
        if program.in_slabs and backend.convolves_channels_last:
            jaxpr = channels_last(jaxpr)
    elif program.pins:
        jaxpr = program.marked
    if jaxpr is not None:
        step = as_step(program, jaxpr)
    if program.traced.lowers_by_leaves:
        step = compat.jaxpr_as_fun(program.traced.jaxpr if jaxpr is None else jaxpr)
        dynamic = dynamic_arguments(program.step, args, kwargs, program.options)
        leaves = jax.tree_util.tree_leaves(dynamic)
        args = leaves
        kwargs = {}
        options = _options_of_leaves(program)
    on_host, returned = (
        (program.on_host, program.returned_to_host) if backend.has_own_memory else ((), ())
    )
    return Lowerable(step, args, kwargs, options, on_host, returned, program.machine)


def as_step(program: Program, jaxpr: compat.ClosedJaxpr) -> Callable[..., Any]:
    """A function with the step's signature and `jax.jit` options that evaluates `jaxpr`."""
    evaluate = compat.jaxpr_as_fun(jaxpr)

    @functools.wraps(program.step)
    def planned(*args: Any, **kwargs: Any) -> Any:
        leaves = jax.tree_util.tree_leaves((args, kwargs))
        # static arguments are not traced
        dynamic = [leaf for leaf in leaves if isinstance(leaf, Tracer)]
        return jax.tree_util.tree_unflatten(program.traced.out_tree, evaluate(*dynamic))

    return planned


def _options_of_leaves(program: Program) -> dict[str, Any]:
    """The options of `jax.jit` for a function of the leaves.

    Raises:
      UnsupportedProgramError: the step's options have shardings.
    """
    names = ("keep_unused", "compiler_options")
    kept = {name: program.options[name] for name in names if name in program.options}
    if {"in_shardings", "out_shardings"} & set(program.options):
        raise UnsupportedProgramError(
            f"the arguments of {program.name} are in containers that jax cannot lower with "
            "shardings. Omit in_shardings and out_shardings, or pass the contents of the "
            "containers."
        )
    donated = tuple(number for number, is_donated in enumerate(program.donated) if is_donated)
    return {**kept, "donate_argnums": donated}


def channels_last(closed: compat.ClosedJaxpr) -> compat.ClosedJaxpr:
    """The jaxpr with channels-last convolutions in its loops and branches, for XLA:CPU.

    XLA:CPU transposes the convolutions of the entry computation into this form and calls a library.
    In other computations it does not: it computes convolutions of another form, such as every
    gradient of a convolution, element by element. A small U-Net in slabs took three times as long.
    """
    return _traced(closed, inside=False)


def _traced(closed: compat.ClosedJaxpr, inside: bool) -> compat.ClosedJaxpr:
    avals = compat.structs_of(closed.jaxpr.invars)
    return jax.make_jaxpr(
        lambda *operands: interpret(closed, operands, partial(_run, inside)),
    )(*avals)


def _run(inside: bool, eqn: compat.JaxprEqn, operands: list[Any]) -> Sequence[Any]:
    is_inlined = compat.is_shard_map(eqn)
    for index, inner in enumerate(compat.bodies_of(eqn)):
        with compat.inside(eqn):
            body = _traced(inner.body, inside or not is_inlined)
        eqn = compat.with_computation(eqn, index, body)
    is_convolution = eqn.primitive.name == "conv_general_dilated"
    if inside and is_convolution and eqn.params["batch_group_count"] == 1:
        return [_convolution(eqn, *operands)]
    return compat.bind(eqn, operands)


def _convolution(eqn: compat.JaxprEqn, x: Any, kernel: Any) -> Any:
    """The convolution with transposed operands, and its result transposed back."""
    numbers = eqn.params["dimension_numbers"]
    rank = x.ndim
    space = range(1, rank - 1)
    channels_last_numbers = lax.ConvDimensionNumbers(
        (0, rank - 1, *space), (rank - 1, rank - 2, *range(rank - 2)), (0, rank - 1, *space)
    )
    batch, channels, *spatial = numbers.lhs_spec
    outputs, inputs, *window = numbers.rhs_spec
    operands = (
        lax.transpose(x, (batch, *spatial, channels)),
        lax.transpose(kernel, (*window, inputs, outputs)),
    )
    params = {**eqn.params, "dimension_numbers": channels_last_numbers}
    (result,) = compat.bind(eqn.replace(params=params), operands)
    batch, channels, *spatial = numbers.out_spec
    order = (batch, *spatial, channels)
    return lax.transpose(result, tuple(map(order.index, range(rank))))
