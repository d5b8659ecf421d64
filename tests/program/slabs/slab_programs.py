"""Random steps with an axis to follow (convolutions with what stands between them, and a loss), and random slabs."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import lax

from memplan.hardware import catalog
from memplan.planning.slabs.choice import Choice
from memplan.planning.slabs.cut import SlabCuts
from memplan.planning.slabs.price import Pricer, SlabLimits
from memplan.planning.slabs.slabs import LoopOverSlabs, Slabs, Walls, least_rows, trips_of
from memplan.program import compat
from memplan.program.flat import Flat, flatten
from memplan.program.ops import shape_of
from memplan.program.slabs.axis import SlabAxis
from memplan.program.slabs.choose import large_ops
from memplan.program.slabs.write import axis_at

_DEVICE = catalog.named("v100")
_FEW = 8.0  # numbers of exact steps are cut off there, so that no sum of them leaves the whole numbers of float32

Weight = Callable[..., Any]
"""The next weight, of a shape."""


class Layer(NamedTuple):
    """One layer; most kinds look at some of the sizes only."""

    kind: str
    size: int
    stride: int
    dilation: int
    groups: int
    features: int
    valid: bool
    back: int


class Step(NamedTuple):
    """Loss and gradients of a stack of layers, or what the stack makes of its input.

    Attributes:
      exact: of whole numbers, in which nothing is rounded.
      gradient: none and no loss, none, of the weights, or of the input too.
    """

    batch: int
    space: tuple[int, ...]
    features: int
    layers: tuple[Layer, ...]
    loss: str
    exact: bool
    dtype: str
    gradient: str
    seed: int

    def numbers(self, *shape: int, seed: int = 0) -> np.ndarray:
        """Normal ones, or where all is exact whole ones, half of them zero."""
        draw = np.random.default_rng(self.seed + seed)
        scale = math.sqrt(max(math.prod(shape[:-1]), 1)) if seed else 1
        normal = draw.normal(size=shape) / scale
        whole = draw.integers(-1, 2, shape) * draw.integers(0, 2, shape)
        return np.asarray(whole if self.exact else normal, jnp.dtype(self.dtype))

    def flat_and_operands(self) -> tuple[compat.ClosedJaxpr, list[np.ndarray]]:
        """The flat jaxpr, and operands."""
        shapes: list[tuple[int, ...]] = []

        def record(*shape: int) -> Any:
            shapes.append(shape)
            return jnp.zeros(shape, self.dtype)

        x = self.numbers(self.batch, *self.space, self.features)
        jax.eval_shape(lambda x: _result(self, x, record), x)
        weights = [self.numbers(*shape, seed=number + 1) for number, shape in enumerate(shapes)]
        return flatten(jax.make_jaxpr(self.function)(weights, x)), [*weights, x]

    @property
    def function(self) -> Callable[..., Any]:
        """Of the weights and the input."""
        return {
            "none": self.result,
            "loss": self.result,
            "weights": jax.value_and_grad(self.result),
            "all": jax.value_and_grad(self.result, argnums=(0, 1)),
        }[self.gradient]

    def result(self, weights: Sequence[Any], x: Any) -> Any:
        remaining = list(weights)
        return _result(self, x, lambda *_: remaining.pop(0))


def _result(step: Step, x: Any, weight: Weight) -> Any:
    kept = [x]
    for layer in step.layers:
        x = _KINDS[layer.kind](step, layer, x, kept, weight)
        kept.append(x)
    if step.gradient == "none":
        return x
    return _LOSSES[step.loss](x if x.shape[-1] > 1 else jnp.concatenate([x, -x], -1), step)


def _names(x: Any) -> tuple[str, str, str]:
    space = "DHW"[5 - x.ndim :]
    return f"N{space}C", f"{space}IO", f"N{space}C"


def _space(x: Any) -> tuple[int, ...]:
    return x.shape[1:-1]


def _padding(layer: Layer, x: Any, reach: int) -> str:
    return "VALID" if layer.valid and min(_space(x)) >= reach else "SAME"


def _convolution(step: Step, layer: Layer, x: Any, kept: Any, weight: Weight) -> Any:
    groups = layer.groups if x.shape[-1] % layer.groups == 0 else 1
    w = weight(*(layer.size,) * len(_space(x)), x.shape[-1] // groups, layer.features)
    padding = _padding(layer, x, (layer.size - 1) * layer.dilation + 1)
    strides, dilation = (layer.stride,) * len(_space(x)), (layer.dilation,) * len(_space(x))
    result = lax.conv_general_dilated(
        x,
        w,
        strides,
        padding,
        rhs_dilation=dilation,
        dimension_numbers=_names(x),
        feature_group_count=groups,
    )
    return _cut_off(step, result)


def _transposed(step: Step, layer: Layer, x: Any, kept: Any, weight: Weight) -> Any:
    if math.prod(_space(x)) > 200:
        return _convolution(step, layer, x, kept, weight)
    w = weight(*(layer.size,) * len(_space(x)), x.shape[-1], layer.features)
    strides = (2,) * len(_space(x))
    return _cut_off(
        step, lax.conv_transpose(x, w, strides, _padding(layer, x, 1), dimension_numbers=_names(x))
    )


def _cut_off(step: Step, x: Any) -> Any:
    return jnp.clip(x, -_FEW, _FEW).astype(x.dtype) if step.exact else x


def _norm(step: Step, layer: Layer, x: Any, kept: Any, weight: Weight) -> Any:
    """Of an instance or of the batch (`groups`), in two passes or fast (`valid`), as Flax computes them.

    Of whole numbers, what is known of all of them in its place: their sum, or the greatest.
    """
    scale, axes = weight(x.shape[-1]), tuple(range(layer.groups % 2, x.ndim - 1))
    if step.exact:
        of_all = (
            lax.stop_gradient(x.max(axes, keepdims=True))
            if layer.valid
            else x.sum(axes, keepdims=True)
        )
        return _cut_off(step, x + _cut_off(step, of_all) * scale)
    if math.prod(x.shape[dim] for dim in axes) < 4:
        return x * scale
    wide = x.astype(jnp.float32)
    mean = wide.mean(axes, keepdims=True)
    if layer.valid:
        variance = jnp.maximum(0.0, jnp.square(wide).mean(axes, keepdims=True) - jnp.square(mean))
    else:
        variance = jnp.square(wide - mean).mean(axes, keepdims=True)
    return ((wide - mean) * lax.rsqrt(variance + 0.01)).astype(x.dtype) * scale


def _bias(step: Step, layer: Layer, x: Any, kept: Any, weight: Weight) -> Any:
    return x + weight(x.shape[-1])


def _relu(step: Step, layer: Layer, x: Any, kept: Any, weight: Weight) -> Any:
    return jax.nn.relu(x)


def _windows(layer: Layer, x: Any, size: int) -> tuple[tuple[int, ...], tuple[int, ...], str]:
    rank = len(_space(x))
    return (1, *(size,) * rank, 1), (1, *(layer.stride,) * rank, 1), _padding(layer, x, size)


def _max_pool(step: Step, layer: Layer, x: Any, kept: Any, weight: Weight) -> Any:
    lowest = -np.inf if jnp.issubdtype(x.dtype, jnp.floating) else np.iinfo(x.dtype).min
    windows = _windows(layer, x, 2 + layer.valid)
    return lax.reduce_window(x, np.array(lowest, x.dtype), lax.max, *windows)


def _average_pool(step: Step, layer: Layer, x: Any, kept: Any, weight: Weight) -> Any:
    total = lax.reduce_window(x, np.zeros((), x.dtype), lax.add, *_windows(layer, x, 2))
    return (
        total * x.dtype.type(0.5 ** len(_space(x)))
        if jnp.issubdtype(x.dtype, jnp.floating)
        else total
    )


def _upsample(step: Step, layer: Layer, x: Any, kept: Any, weight: Weight) -> Any:
    if math.prod(_space(x)) > 200:
        return x
    batch, *space, features = x.shape
    spaced = x.reshape(batch, *(size for rows in space for size in (rows, 1)), features)
    shape = batch, *(size for rows in space for size in (rows, 2)), features
    return jnp.broadcast_to(spaced, shape).reshape(batch, *(2 * rows for rows in space), features)


def _resize(step: Step, layer: Layer, x: Any, kept: Any, weight: Weight) -> Any:
    """By any factor, in all of space; of whole numbers twice as many rows, which are whole numbers of quarters."""
    if math.prod(_space(x)) > 200:
        return x
    sizes = [layer.size * size // layer.stride + layer.dilation - 1 for size in _space(x)]
    method = "nearest" if layer.valid else ("linear", "cubic")[layer.groups - 1]
    if step.exact and not layer.valid and jnp.issubdtype(x.dtype, jnp.floating):
        sizes, method = [2 * x.shape[1], *_space(x)[1:]], "linear"
        return _cut_off(step, 4 * jax.image.resize(x, (x.shape[0], *sizes, x.shape[-1]), method))
    method = "nearest" if step.exact else method
    return jax.image.resize(x, (x.shape[0], *(max(size, 1) for size in sizes), x.shape[-1]), method)


def _alike(x: Any, skipped: Any) -> tuple[Any, Any]:
    """The rows in space that both have, from the last ones of the first."""
    shared = [min(pair) for pair in zip(_space(x), _space(skipped), strict=True)]
    last = tuple(slice(size - count, size) for count, size in zip(shared, _space(x), strict=True))
    first = tuple(slice(0, count) for count in shared)
    return x[:, *last], skipped[:, *first]


def _skip(step: Step, layer: Layer, x: Any, kept: Any, weight: Weight) -> Any:
    return jnp.concatenate(_alike(x, kept[-1 - layer.back % len(kept)]), -1)


def _residual(step: Step, layer: Layer, x: Any, kept: Any, weight: Weight) -> Any:
    cropped, skipped = _alike(x, kept[-1 - layer.back % len(kept)])
    same = cropped.shape == skipped.shape
    return cropped + (skipped if same else skipped.sum(-1, keepdims=True))


def _cumulative(step: Step, layer: Layer, x: Any, kept: Any, weight: Weight) -> Any:
    """Along a dimension of space or the batch; gradients go through sums, which are cumulative the other way there."""
    scan = (lax.cummin, lax.cummax, lax.cumsum)[layer.size - 1]
    operand = x if scan is lax.cumsum else lax.stop_gradient(x)
    result = scan(operand, layer.back % (x.ndim - 1), layer.dilation == 2)
    return _cut_off(step, x + result) if step.exact else x + result / 4


_KINDS: dict[str, Callable[..., Any]] = {
    "convolution": _convolution,
    "transposed": _transposed,
    "norm": _norm,
    "bias": _bias,
    "relu": _relu,
    "max pool": _max_pool,
    "average pool": _average_pool,
    "upsample": _upsample,
    "resize": _resize,
    "skip": _skip,
    "residual": _residual,
    "cumulative": _cumulative,
}


def _labels(x: Any) -> Any:
    return np.random.default_rng(0).integers(0, x.shape[-1], x.shape[:-1])


def _cross_entropy(x: Any, step: Step) -> Any:
    logs = jax.nn.log_softmax(x.astype(jnp.float32))
    return -jnp.take_along_axis(logs, jnp.asarray(_labels(x))[..., None], -1).mean()


def _dice(x: Any, step: Step) -> Any:
    share, wanted = jax.nn.softmax(x.astype(jnp.float32)), jax.nn.one_hot(_labels(x), x.shape[-1])
    space = tuple(range(1, x.ndim - 1))
    both, either = (share * wanted).sum(space), (share + wanted).sum(space)
    return 1 - ((2 * both + 1) / (either + 1)).mean()


def _product(x: Any, step: Step) -> Any:
    """Without a gradient the greatest and the least too, of which that divides by how many there are."""
    total = (x * step.numbers(*x.shape)).sum()
    return (
        total
        if step.gradient != "loss"
        else (total, x.max(tuple(range(x.ndim - 1))), x.min(1), x.argmax(-1))
    )


_LOSSES: dict[str, Callable[..., Any]] = {
    "squares": lambda x, step: jnp.square(x.astype(jnp.float32)).mean(),
    "cross-entropy": _cross_entropy,
    "dice": _dice,
    "product": _product,
}

_LAYERS = st.builds(
    Layer,
    kind=st.sampled_from([*_KINDS, "convolution", "convolution"]),
    size=st.sampled_from([3, 3, 1, 2]),
    stride=st.integers(1, 2),
    dilation=st.sampled_from([1, 1, 2]),
    groups=st.integers(1, 2),
    features=st.sampled_from([2, 4]),
    valid=st.booleans(),
    back=st.integers(0, 5),
)  # fmt: skip


@st.composite
def slab_programs(
    draw: Any, exact: bool = False, dtypes: Sequence[str] = ("float32",), layers: int = 6
) -> Step:
    """`exact`: results of any order of sums are the same to the bit; gradients of floating-point numbers alone."""
    dtype = draw(st.sampled_from(dtypes))
    floating = jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    rank = draw(st.integers(1, 3))
    sides = st.integers(3, {1: 12, 2: 9, 3: 6}[rank])
    return Step(
        batch=draw(st.integers(1, 3)),
        space=tuple(draw(st.lists(sides, min_size=rank, max_size=rank))),
        features=draw(st.sampled_from([1, 2])),
        layers=tuple(draw(st.lists(_LAYERS, min_size=1, max_size=layers))),
        loss=draw(st.sampled_from(["product"] if exact else ["squares", "cross-entropy", "dice"])),
        exact=exact,
        dtype=dtype,
        gradient=draw(
            st.sampled_from(["weights", "all", "none", "loss"] if floating else ["none", "loss"])
        ),
        seed=draw(st.integers(0, 1000)),
    )


class Cut(NamedTuple):
    """Which slabs of a program: numbers that are taken modulo what there is.

    Attributes:
      value: the axis begins at one of its largest values.
      theta: from which part of the largest value on arrays are in slabs.
      stored: None = as a `Choice` has it, or a random half of all values.
    """

    value: int
    dim: int
    slabs: int
    theta: int
    stored: int | None

    def of(self, flat: Flat) -> tuple[SlabAxis, Slabs] | None:
        """None where nothing on the axis runs in slabs."""
        variables = flat.values
        sizes = [compat.nbytes_of(variable.aval) for variable in variables]
        largest = sorted(range(len(sizes)), key=lambda number: -sizes[number])
        value = largest[self.value % min(len(largest), 6)]
        dims = [dim for dim, size in enumerate(shape_of(variables[value])) if size > 1]
        if not dims:
            return None
        dim = dims[self.dim % len(dims)]
        axis = axis_at(flat, value, dim)
        ops = large_ops(axis.graph, max(sizes) // self.theta)
        if not ops:
            return None
        min_rows = least_rows(axis.graph, ops)
        rows = -(-shape_of(variables[value])[dim] // self.slabs)
        bare = Slabs(value, dim, -(-rows // min_rows) * min_rows, ops, frozenset(), frozenset())
        return axis, self._stored(axis, bare)

    def _stored(self, axis: SlabAxis, bare: Slabs) -> Slabs:
        values = [value for op in sorted(bare.ops) for value in axis.graph.graph.ops[op].outputs]
        if self.stored is not None:
            draw = np.random.default_rng(self.stored)
            half = draw.integers(0, 2, len(values))
            stored = frozenset(value for value, take in zip(values, half, strict=True) if take)
            slabs = replace(bare, stored=stored)
            loops = loops_of(axis, slabs)
            read = [
                (value, loop.level) for loop in loops for value in loop.reads if value in stored
            ]
            recomputed = frozenset(pair for pair in read if draw.integers(0, 3) == 0)
            return replace(slabs, recomputed_in=recomputed)
        limits = SlabLimits(1 << 40, 1 << 40, 0)
        cuts = SlabCuts(Pricer(Walls(axis.graph, bare.ops), _DEVICE))
        slabs, _ = Choice(cuts, bare, limits).best()
        return replace(slabs, on_host=frozenset())


CUTS = st.builds(
    Cut,
    value=st.integers(0, 5),
    dim=st.integers(0, 4),
    slabs=st.integers(1, 7),
    theta=st.sampled_from([1, 2, 4, 16, 1 << 20]),
    stored=st.none() | st.integers(0, 1000),
)  # fmt: skip


def loops_of(axis: SlabAxis, slabs: Slabs) -> list[LoopOverSlabs]:
    return Walls(axis.graph, slabs.ops).loops(slabs)


def trips(axis: SlabAxis, slabs: Slabs) -> int:
    return trips_of(axis.graph, slabs)
