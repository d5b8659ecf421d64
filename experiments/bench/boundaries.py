"""Random training steps whose layers are inside of boundaries, each generated from its number.

A boundary is whatever a value crosses on its way from the forward to the backward pass: a loop, a
branch, a part for each device, a jitted call, a rule of differentiation, a `jax.checkpoint`. Up to
three of them are nested, around each layer, around the net (the gradient is taken through them), or
around the whole step (the gradient is taken inside).

Each program has two versions: plain, and by hand, with `jax.checkpoint` around its layer.
"""

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

Array = jax.Array
Weights = Any
Batch = Any
"""Arrays whose first dimension is the rows of the batch."""
Part = Callable[[Weights, Batch], Batch]
"""A layer or the net: weights and batch -> batch."""
Step = Callable[[Weights, Array], tuple[Weights, Array]]
"""Weights and batch -> new weights or gradients, and the loss."""
PIECES = 4  # Microbatches of a loop or a `vmap`.
_STEPS = 3  # Training steps of a loop around the step.
_LAYERS = (6, 8, 10)
_RATE = 1e-2
# Share of nets whose layers are a scan, beside those whose turn it is: with these, 16 of the first
# 40 programs have one.
_SCANNED = 0.4


class Boundary(NamedTuple):
    """A boundary around each layer, around the net, or around the step.

    `Boundary("layers", "scan")` is the loop over the layers itself.
    """

    level: str
    kind: str

    def __str__(self) -> str:
        return f"{self.kind} of {self.level}"


@dataclass(frozen=True)
class Recipe:
    """What a program is made of.

    Attributes:
      number: of the program.
      layer: kind of its layers.
      layers: number of layers.
      boundaries: from the outside in.
      pullbacks: cotangents that the net's results get: one, or two of one `jax.vjp`.
      second_order: whether the loss has the gradient of the net with respect to the batch.
      skips: whether each layer also reads the output of an earlier one.
      columns: whether each layer gives a column of the results.
      updates: whether the step returns new weights; otherwise gradients.
      donated: whether the weights are donated.
    """

    number: int
    layer: str
    layers: int
    boundaries: tuple[Boundary, ...]
    pullbacks: int
    second_order: bool
    skips: bool
    columns: bool
    updates: bool
    donated: bool

    @property
    def is_scanned(self) -> bool:
        return SCAN_OF_LAYERS in self.boundaries

    def kinds(self, level: str) -> list[str]:
        """The boundaries around a level, from the outside in."""
        return [boundary.kind for boundary in self.boundaries if boundary.level == level]

    def __str__(self) -> str:
        """The boundaries from the outside in, and what else is not usual."""
        traits = {
            "two pullbacks": self.pullbacks == 2, "second order": self.second_order,
            "skips": self.skips, "columns": self.columns,
            "gradients": not self.updates,
        }  # fmt: skip
        nest = [str(boundary) for boundary in self.boundaries] or ["no boundary"]
        return ", ".join([*nest, *(name for name, is_so in traits.items() if is_so)])


@dataclass(frozen=True)
class Size:
    """Sides of arrays: rows, features and hidden features; of images batch, side and channels."""

    dense: tuple[int, int, int]
    images: tuple[int, int, int]


# Steps take 5 to 42 MiB, of which the version by hand saves 0.5 to 34, and compile in a second.
ON_CPU = Size((512, 64, 256), (64, 8, 16))
# Steps take 570 MiB to 6.4 GiB on each device, and compile in half a second to ten.
ON_GPU = Size((16384, 256, 1024), (64, 64, 32))


# Layers. Each maps weights and rows to rows of the same shape.


def _normalized(x: Array) -> Array:
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def _convolved(x: Array, kernel: Array) -> Array:
    return lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


@dataclass(frozen=True)
class _Layer:
    """A kind of layer: a residual block's branch.

    Attributes:
      weights: for each weight, whether it widens, narrows or keeps the features.
      apply: weights and rows -> what is added to the rows.
      has_images: whether a row is an image.
    """

    weights: tuple[str, ...]
    apply: Callable[..., Array]
    has_images: bool = False

    def shapes(self, size: Size) -> list[tuple[int, ...]]:
        _, side, hidden = size.dense
        widths = {"widens": (side, hidden), "narrows": (hidden, side), "keeps": (side, side)}
        if self.has_images:
            channels = size.images[2]
            return [(3, 3, channels, channels)] * len(self.weights)
        return [widths[weight] for weight in self.weights]

    def rows(self, size: Size) -> tuple[int, ...]:
        """The shape of a batch."""
        batch, side, channels = size.images
        return (batch, side, side, channels) if self.has_images else size.dense[:2]


LAYERS: Mapping[str, _Layer] = {
    "mlp": _Layer(("widens", "narrows"), lambda x, a, b: jnp.tanh(x @ a) @ b),
    "gated": _Layer(
        ("widens", "widens", "narrows"), lambda x, a, b, c: (jax.nn.silu(x @ a) * (x @ b)) @ c
    ),
    "normalized": _Layer(
        ("widens", "narrows"), lambda x, a, b: jax.nn.gelu(_normalized(x) @ a) @ b
    ),
    "conv": _Layer(
        ("keeps", "keeps"), lambda x, a, b: _convolved(jax.nn.relu(_convolved(x, a)), b), True
    ),
    "gated conv": _Layer(
        ("keeps", "keeps"),
        lambda x, a, b: _convolved(x, a) * jax.nn.sigmoid(_convolved(x, b)),
        True,
    ),
}


# Boundaries around a layer or the net.


def _first(weights: Weights) -> Array:
    """A number of the weights, which is the same for all rows and devices."""
    return jax.tree.leaves(weights)[0].ravel()[0]


def _rest(part: Part, weights: Weights, batch: Batch) -> Batch:
    """Pass the rows on; results of another shape are the means of the rows."""
    rows = jax.tree.leaves(batch)[0]
    mean = rows.mean(tuple(range(1, rows.ndim)))

    def passed(leaf: Any) -> Array:
        return rows if leaf.shape == rows.shape else jnp.stack([mean] * leaf.shape[1], 1)

    return jax.tree.map(passed, jax.eval_shape(part, weights, batch))


def _cond(part: Part) -> Part:
    def branched(weights: Weights, batch: Batch) -> Batch:
        return lax.cond(_first(weights) < 9, part, partial(_rest, part), weights, batch)

    return branched


def _switch(part: Part) -> Part:
    """Three branches, of which two hold the part."""

    def halved(weights: Weights, batch: Batch) -> Batch:
        return part(jax.tree.map(lambda leaf: leaf / 2, weights), batch)

    def branched(weights: Weights, batch: Batch) -> Batch:
        index = (_first(weights) > 0).astype(jnp.int32)
        return lax.switch(index, [part, halved, partial(_rest, part)], weights, batch)

    return branched


def _custom_vjp(part: Part) -> Part:
    """A rule that clips the gradient on its way back."""

    def backward(pull: Callable[..., Any], cotangents: Batch) -> tuple[Weights, Batch]:
        return pull(jax.tree.map(lambda leaf: jnp.clip(leaf, -1, 1), cotangents))

    ruled: Any = jax.custom_vjp(part)
    ruled.defvjp(partial(jax.vjp, part), backward)
    return ruled


def _custom_jvp(part: Part) -> Part:
    ruled: Any = jax.custom_jvp(part)
    ruled.defjvp(lambda primals, tangents: jax.jvp(part, primals, tangents))
    return ruled


def _pieces(batch: Batch) -> Batch:
    """Microbatches as the second dimension, so that rows stay on their device."""
    return jax.tree.map(
        lambda leaf: leaf.reshape(leaf.shape[0] // PIECES, PIECES, *leaf.shape[1:]), batch
    )


def _stacked(batch: Batch) -> Batch:
    """Microbatches as the first dimension, as loops take them."""
    return jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 1, 0), _pieces(batch))


def _merged(stacks: Batch) -> Batch:
    """The rows of all microbatches, given that these are the first dimension."""
    return jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, 1).reshape(-1, *leaf.shape[2:]), stacks)


def _vmap(part: Part) -> Part:
    return lambda weights, batch: _merged(
        jax.vmap(part, in_axes=(None, 1))(weights, _pieces(batch))
    )


def _map(part: Part) -> Part:
    return lambda weights, batch: _merged(lax.map(partial(part, weights), _stacked(batch)))


def _scan(part: Part) -> Part:
    """A loop over microbatches, each of which adds a number of the previous one's results."""

    def scanned(weights: Weights, batch: Batch) -> Batch:
        def body(number: Array, piece: Batch) -> tuple[Array, Batch]:
            results = part(weights, jax.tree.map(lambda leaf: leaf + number, piece))
            return 1e-3 * jax.tree.leaves(results)[0].ravel()[0], results

        start = 0 * jax.tree.leaves(batch)[0].ravel()[0]
        return _merged(lax.scan(body, start, _stacked(batch))[1])

    return scanned


def _rows_of(mesh: Any) -> PartitionSpec:
    """The rows over all devices."""
    return PartitionSpec(mesh.axis_names)


def _sharded_jit(mesh: Any, part: Part) -> Part:
    shardings = [NamedSharding(mesh, spec) for spec in (PartitionSpec(), _rows_of(mesh))]
    return jax.jit(part, in_shardings=tuple(shardings), out_shardings=shardings[1])


def _shard_map(mesh: Any, part: Part) -> Part:
    specs = PartitionSpec(), _rows_of(mesh)
    return jax.shard_map(part, mesh=mesh, in_specs=specs, out_specs=specs[1])


_AROUND_PARTS: Mapping[str, Callable[[Part], Part]] = {
    "cond": _cond, "switch": _switch, "jit": jax.jit, "vmap": _vmap, "map": _map, "scan": _scan,
    "custom_vjp": _custom_vjp, "custom_jvp": _custom_jvp,
}  # fmt: skip


# Boundaries around the step.


def _step_cond(step: Step) -> Step:
    def idle(weights: Weights, x: Array) -> tuple[Weights, Array]:
        return weights, jnp.float32(0)

    return lambda weights, x: lax.cond(jnp.isfinite(_first(weights)), step, idle, weights, x)


def _step_switch(step: Step) -> Step:
    """Three branches, of which two hold the step."""

    def idle(weights: Weights, x: Array) -> tuple[Weights, Array]:
        return weights, jnp.float32(0)

    def negated(weights: Weights, x: Array) -> tuple[Weights, Array]:
        return step(weights, -x)

    def branched(weights: Weights, x: Array) -> tuple[Weights, Array]:
        index = (_first(weights) > 0).astype(jnp.int32)
        return lax.switch(index, [step, negated, idle], weights, x)

    return branched


def _step_fori(step: Step) -> Step:
    return lambda weights, x: lax.fori_loop(
        0, _STEPS, lambda _, carry: step(carry[0], x), (weights, jnp.float32(0))
    )


def _step_while(step: Step) -> Step:
    """At most three steps, until the loss is small."""

    def goes_on(carry: tuple[Array, Weights, Array]) -> Array:
        return (carry[0] < _STEPS) & (carry[2] > 1e-3)

    def repeated(weights: Weights, x: Array) -> tuple[Weights, Array]:
        def body(carry: tuple[Array, Weights, Array]) -> tuple[Array, Weights, Array]:
            return carry[0] + 1, *step(carry[1], x)

        return lax.while_loop(goes_on, body, (jnp.int32(0), weights, jnp.float32(9)))[1:]

    return repeated


def _step_scan(step: Step) -> Step:
    """A step for each microbatch, one after another."""

    def scanned(weights: Weights, x: Array) -> tuple[Weights, Array]:
        weights, losses = lax.scan(step, weights, _stacked(x))
        return weights, losses.mean()

    return scanned


def _averaged(results: tuple[Weights, Array]) -> tuple[Weights, Array]:
    return jax.tree.map(lambda leaf: leaf.mean(0), results)


def _step_map(step: Step) -> Step:
    """A step for each microbatch from the same weights, whose results are averaged."""
    return lambda weights, x: _averaged(lax.map(partial(step, weights), _stacked(x)))


def _step_vmap(step: Step) -> Step:
    return lambda weights, x: _averaged(jax.vmap(step, (None, 1))(weights, _pieces(x)))


def _step_sharded_jit(mesh: Any, step: Step) -> Step:
    whole = NamedSharding(mesh, PartitionSpec())
    rows = NamedSharding(mesh, _rows_of(mesh))
    return jax.jit(step, in_shardings=(whole, rows), out_shardings=whole)


def _step_shard_map(mesh: Any, step: Step) -> Step:
    specs = PartitionSpec(), _rows_of(mesh)
    return jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())


_AROUND_STEPS: Mapping[str, Callable[[Step], Step]] = {
    "fori_loop": _step_fori, "while_loop": _step_while, "scan": _step_scan, "cond": _step_cond,
    "switch": _step_switch, "jit": jax.jit, "vmap": _step_vmap, "map": _step_map,
}  # fmt: skip
_OVER_MESHES: Mapping[str, tuple[Callable[..., Part], Callable[..., Step]]] = {
    "shard_map": (_shard_map, _step_shard_map),
    "sharded jit": (_sharded_jit, _step_sharded_jit),
}
_TRAINING = ("fori_loop", "while_loop", "scan", "cond", "switch")
"""Boundaries that carry the weights on, so that the step returns new ones."""
_DIVIDING = ("scan", "map")
"""Loops around the step that keep one microbatch's residuals at a time."""


# Recipes.

SCAN_OF_LAYERS = Boundary("layers", "scan")
_PARTS = (*_AROUND_PARTS, "checkpoint")
ON_ONE_DEVICE = (
    SCAN_OF_LAYERS,
    *(Boundary(level, kind) for kind in _PARTS for level in ("net", "layer")),
    *(Boundary("step", kind) for kind in _AROUND_STEPS),
)
ON_MESHES = tuple(
    Boundary(level, kind) for kind in _OVER_MESHES for level in ("net", "step", "layer")
)
_LEVELS = ("step", "net", "layers", "layer")
"""From the outside in."""


def recipe_of(number: int, meshed: bool = False) -> Recipe:
    """The recipe of a program.

    Boundaries have turns to be in a program, so that as many programs as there are boundaries have
    each of them; on a mesh, those that divide work among devices. The other boundaries are drawn.
    Program 0 has no boundary.
    """
    draw = random.Random(f"{number} {meshed}")
    turns = list(ON_MESHES if meshed else ON_ONE_DEVICE)
    random.Random(len(turns)).shuffle(turns)
    boundaries = [turns[(number - 1) % len(turns)]] if number or meshed else []
    if boundaries and draw.random() < _SCANNED and SCAN_OF_LAYERS not in boundaries:
        boundaries.append(SCAN_OF_LAYERS)
    depth = draw.choice((1, 2, 2, 3)) if boundaries else 0
    while len(boundaries) < depth:
        boundary = draw.choice(ON_ONE_DEVICE)
        if boundary not in boundaries:
            boundaries.append(boundary)
    boundaries.sort(key=lambda boundary: _LEVELS.index(boundary.level))
    trains = any(level == "step" and kind in _TRAINING for level, kind in boundaries)
    updates = trains or draw.random() < 0.8
    second_order = draw.random() < 0.05
    return Recipe(
        number=number,
        layer=draw.choice(list(LAYERS)),
        layers=draw.choice(_LAYERS),
        boundaries=tuple(boundaries),
        pullbacks=1 if second_order else draw.choice((1, 1, 1, 2)),
        second_order=second_order,
        skips=draw.random() < 0.25,
        columns=draw.random() < 0.25,
        updates=updates,
        donated=updates and draw.random() < 0.7,
    )


def mesh_of(topology: str) -> AbstractMesh:
    """The mesh of a machine, such as "2x4" for two hosts of four devices."""
    hosts, per_host = map(int, topology.split("x"))
    return AbstractMesh((hosts, per_host), ("host", "device"), axis_types=(AxisType.Auto,) * 2)


# Programs.


@dataclass(frozen=True)
class Program:
    """A recipe at a size, over a mesh or on one device."""

    recipe: Recipe
    size: Size
    mesh: Mesh | AbstractMesh | None = None

    @property
    def donated(self) -> tuple[int, ...]:
        return (0,) if self.recipe.donated else ()

    def args(self) -> tuple[Weights, Any]:
        """The shapes of the weights and of the batch."""
        recipe, layer = self.recipe, LAYERS[self.recipe.layer]
        rows, *row = layer.rows(self.size)
        divided = sum(kind in _DIVIDING for kind in recipe.kinds("step"))
        rows *= PIECES**divided * (self.mesh.size if self.mesh else 1)
        shapes = layer.shapes(self.size)
        if recipe.is_scanned:
            weights = [self._shape((recipe.layers, *shape)) for shape in shapes]
        else:
            weights = [[self._shape(shape) for shape in shapes] for _ in range(recipe.layers)]
        batch = self._shape((rows, *row), _rows_of(self.mesh) if self.mesh else None)
        return weights, batch

    def _shape(self, shape: tuple[int, ...], spec: PartitionSpec | None = None) -> Any:
        sharding = NamedSharding(self.mesh, spec or PartitionSpec()) if self.mesh else None
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    def arrays(self) -> tuple[Weights, Array]:
        """Arguments on this machine."""
        normal = np.random.default_rng(self.recipe.number).standard_normal

        def weight(leaf: Any) -> Array:
            inputs = math.prod(leaf.shape[self.recipe.is_scanned : -1])
            return jnp.asarray(normal(leaf.shape, np.float32) * 0.5 * inputs**-0.5)

        weights, batch = self.args()
        return jax.tree.map(weight, weights), jnp.asarray(normal(batch.shape, np.float32))

    def step(self, by_hand: bool = False) -> Step:
        """The step; `by_hand` puts `jax.checkpoint` around its layer."""
        step = self._step(self._net(by_hand))
        for kind in reversed(self.recipe.kinds("step")):
            over_mesh = _OVER_MESHES.get(kind)
            step = over_mesh[1](self.mesh, step) if over_mesh else _AROUND_STEPS[kind](step)
        return step

    def _within(self, level: str, part: Part) -> Part:
        """A layer or the net, within its boundaries."""
        for kind in reversed(self.recipe.kinds(level)):
            if kind == "checkpoint":
                policy = jax.checkpoint_policies.dots_saveable if level == "layer" else None
                part = jax.checkpoint(part, policy=policy, prevent_cse=not self.recipe.is_scanned)
            elif kind in _OVER_MESHES:
                part = _OVER_MESHES[kind][0](self.mesh, part)
            else:
                part = _AROUND_PARTS[kind](part)
        return part

    def _layer(self, by_hand: bool) -> Part:
        apply = LAYERS[self.recipe.layer].apply

        def layer(weights: Weights, batch: Batch) -> Array:
            x, *early = batch
            x = x + apply(x, *weights)
            return x + 0.1 * early[0] if early else x

        bounded = self._within("layer", layer)
        return (
            jax.checkpoint(bounded, prevent_cse=not self.recipe.is_scanned) if by_hand else bounded
        )

    def _net(self, by_hand: bool) -> Part:
        """The layers: weights and rows -> rows, and those of its layers if it has columns."""
        recipe, layer = self.recipe, self._layer(by_hand)
        draw = random.Random(recipe.number)
        skips = [draw.randint(0, number) for number in range(recipe.layers)]

        def column(x: Array) -> tuple[Array, ...]:
            return (x.mean(tuple(range(1, x.ndim))),) if recipe.columns else ()

        def scanned(weights: Weights, x: Array) -> Batch:
            first = (x,) if recipe.skips else ()

            def body(x: Array, weight: Weights) -> tuple[Array, tuple[Array, ...]]:
                x = layer(weight, (x, *first))
                return x, column(x)

            x, columns = lax.scan(body, x, weights)
            return x, jax.tree.map(jnp.transpose, columns)

        def unrolled(weights: Weights, x: Array) -> Batch:
            outputs = [x]
            for weight, skip in zip(weights, skips, strict=True):
                early = (outputs[skip],) if recipe.skips else ()
                outputs.append(layer(weight, (outputs[-1], *early)))
            columns = zip(*map(column, outputs[1:]), strict=True)
            return outputs[-1], tuple(jnp.stack(leaves, 1) for leaves in columns)

        return self._within("net", scanned if recipe.is_scanned else unrolled)

    def _step(self, net: Part) -> Step:
        """The gradient of a net, or two of them, and the update of the weights."""
        recipe = self.recipe
        is_local = "shard_map" in recipe.kinds("step")

        def loss_of(weights: Weights, x: Array) -> Array:
            squares = [(leaf**2).mean() for leaf in jax.tree.leaves(net(weights, x))]
            loss = jnp.stack(squares).sum()
            return lax.pmean(loss, self.mesh.axis_names) if is_local and self.mesh else loss

        def penalized(weights: Weights, x: Array) -> Array:
            loss, slope = jax.value_and_grad(loss_of, 1)(weights, x)
            penalty = (slope**2).sum()
            return loss + (
                lax.psum(penalty, self.mesh.axis_names) if is_local and self.mesh else penalty
            )

        def one_pullback(weights: Weights, x: Array) -> tuple[Array, Weights]:
            loss = penalized if recipe.second_order else loss_of
            return jax.value_and_grad(loss)(weights, x)

        def two_pullbacks(weights: Weights, x: Array) -> tuple[Array, Weights]:
            results, pull = jax.vjp(lambda weights: net(weights, x), weights)
            first, second = (
                pull(jax.tree.map(lambda leaf, of=of: of(leaf) / leaf.size, results))[0]
                for of in (lambda leaf: 2 * leaf, jnp.sign)
            )
            products = jax.tree.map(lambda a, b: (a * b).sum(), first, second)
            dot = sum(jax.tree.leaves(products), jnp.float32(0))
            return dot, jax.tree.map(lambda a, b: a + jnp.where(dot > 0, b, 0), first, second)

        def step(weights: Weights, x: Array) -> tuple[Weights, Array]:
            loss, gradients = (one_pullback if recipe.pullbacks == 1 else two_pullbacks)(weights, x)
            if not recipe.updates:
                return gradients, loss
            return jax.tree.map(lambda old, new: old - _RATE * new, weights, gradients), loss

        return step
