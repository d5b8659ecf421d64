"""The parts of a training step: state, gradient and update, random batches, arguments."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax

Batch = dict[str, Any]
Metrics = dict[str, jax.Array]
Config = TypeVar("Config")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """The state of a training; `step` is an int32 scalar, `batch_stats` the running statistics."""

    step: Any
    params: Any
    batch_stats: Any
    opt_state: Any


Step = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
Built = tuple[Step, tuple[TrainState, Batch]]
Loss = Callable[[Any, Any, Batch], tuple[jax.Array, Any]]
"""(params, batch_stats, batch) -> (scalar loss, new batch_stats)."""

Measure = Callable[[Any, jax.Array], jax.Array]
"""(outputs of a model, labels) -> scalar."""

Sample = Callable[[jax.Array], Batch]
"""key -> batch."""


def make_step(loss: Loss, optimizer: optax.GradientTransformation) -> Step:
    """A step that updates the parameters once by the gradient of `loss`."""

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        grad = jax.value_and_grad(loss, has_aux=True)
        (value, batch_stats), gradient = grad(state.params, state.batch_stats, batch)
        updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return TrainState(state.step + 1, params, batch_stats, opt_state), {"loss": value}

    return step


def make_random_step(
    loss_of: Callable[[jax.Array], Loss], optimizer: optax.GradientTransformation, seed: int
) -> Step:
    """As `make_step`, for a loss that needs a random key, for example for dropout.

    The key is derived from `seed` and `state.step`, so each step has its own, and recomputing a
    step uses the same one.
    """

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        return make_step(loss_of(key), optimizer)(state, batch)

    return step


def plain_loss(model: Any, measure: Measure) -> Loss:
    """The loss of a model that is the same in training and evaluation."""

    def loss(params: Any, batch_stats: Any, batch: Batch) -> tuple[jax.Array, Any]:
        return measure(model.apply({"params": params}, batch["image"]), batch["label"]), batch_stats

    return loss


def training_loss(model: Any, measure: Measure, key: jax.Array | None = None) -> Loss:
    """The loss of a model with running statistics, dropout (from `key`) or both."""
    options: dict[str, Any] = {} if key is None else {"rngs": {"dropout": key}}

    def loss(params: Any, batch_stats: Any, batch: Batch) -> tuple[jax.Array, Any]:
        variables = {"params": params, "batch_stats": batch_stats}
        outputs, changed = model.apply(
            variables, batch["image"], train=True, mutable=["batch_stats"], **options
        )
        return measure(outputs, batch["label"]), changed.get("batch_stats", batch_stats)

    return loss


def random_images(image: Sequence[int], label: Sequence[int], classes: int) -> Sample:
    """Random batches: "image" float32 and "label" int32 below `classes`, of these shapes."""

    def sample(key: jax.Array) -> Batch:
        pixels, labels = jax.random.split(key)
        return {
            "image": jax.random.normal(pixels, image),
            "label": jax.random.randint(labels, label, 0, classes),
        }

    return sample


def configured[Config](config: Config, fields: Mapping[str, Any], **overrides: Any) -> Config:
    """`config` with `fields` and all `overrides` but None replaced; a dtype may be a name."""
    fields = {**fields, **{name: value for name, value in overrides.items() if value is not None}}
    if "dtype" in fields:
        fields["dtype"] = jnp.dtype(fields["dtype"])
    record: Any = config
    return replace(record, **fields)


def build(
    model: Any,
    step: Step,
    optimizer: optax.GradientTransformation,
    sample: Sample,
    concrete: bool,
    seed: int,
    inputs: str = "image",
) -> Built:
    """`step` and its arguments; `inputs` is the entry of a batch that initializes the model."""

    def arguments(key: jax.Array) -> tuple[TrainState, Batch]:
        weights, data = jax.random.split(key)
        batch = sample(data)
        variables = model.init(weights, batch[inputs])
        params, batch_stats = variables["params"], variables.get("batch_stats", {})
        return TrainState(
            jnp.zeros((), jnp.int32), params, batch_stats, optimizer.init(params)
        ), batch

    key = jax.random.key(seed)
    return step, _compile_quickly(arguments)(key) if concrete else jax.eval_shape(arguments, key)


def _compile_quickly(function: Callable[..., Any]) -> Callable[..., Any]:
    """Jit without optimization, for a function that runs once: compiling random draws is slow."""
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})
