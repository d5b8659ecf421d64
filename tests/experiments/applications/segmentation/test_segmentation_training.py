"""The step, from a file on disk to a lower loss."""

from pathlib import Path

import jax
import numpy as np
import optax
import pytest

from experiments.applications.segmentation.decathlon import load_case, open_dataset
from experiments.applications.segmentation.losses import hard_dice
from experiments.applications.segmentation.training import batch_of, factory, poly_sgd
from models.train import Batch, unet3d_step
from models.unet3d import UNet3D, UNet3DConfig

TINY = UNet3DConfig(levels=2, filters=4)


@pytest.fixture(scope="module")
def batch(pristine: Path) -> Batch:
    dataset = open_dataset(pristine)
    return batch_of(load_case(dataset, dataset.cases[0]))


def test_factory_allocates_nothing_and_describes_the_batch(batch: Batch) -> None:
    _, (state, abstract) = factory(16, TINY)
    assert all(
        isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves((state, abstract))
    )
    assert {key: (leaf.shape, leaf.dtype) for key, leaf in abstract.items()} == {
        key: (leaf.shape, leaf.dtype) for key, leaf in batch.items()
    }


def test_default_factory_traces_to_its_own_types() -> None:
    """The new state has the structure of the old one, so its buffers can be donated."""
    step, args = factory(64)
    state, metrics = jax.eval_shape(step, *args)
    assert jax.tree.structure(state) == jax.tree.structure(args[0])
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(state)] == [
        (x.shape, x.dtype) for x in jax.tree.leaves(args[0])
    ]
    assert metrics["loss"].shape == ()


def test_size_must_fit_the_levels() -> None:
    with pytest.raises(ValueError, match="divisible by 8"):
        factory(20)


def test_step_is_the_models_own() -> None:
    """The same equations, so measurements with `models.train` hold for this experiment."""
    step, args = factory(16, TINY)
    reference, same_args = unet3d_step(16, config=TINY, optimizer=poly_sgd())
    assert args == same_args
    assert str(jax.make_jaxpr(step)(*args)) == str(jax.make_jaxpr(reference)(*args))


def test_learning_rate_falls_to_zero() -> None:
    """Without momentum, on a gradient of one, each update is the learning rate itself."""
    optimizer = poly_sgd(4, rate=0.1, momentum=0.0)
    state, updates = optimizer.init(np.float32(0)), []
    for _ in range(5):
        update, state = optimizer.update(np.float32(1), state)
        updates.append(float(np.asarray(update)))
    np.testing.assert_allclose(updates, [-0.1 * (1 - t / 4) ** 0.9 for t in range(5)], rtol=1e-5)


def test_momentum_looks_ahead() -> None:
    """Nesterov (Sutskever et al., 2013): momentum already counts in the first update."""
    optimizer = poly_sgd(4, rate=0.1, momentum=0.5)
    update, _ = optimizer.update(np.float32(1), optimizer.init(np.float32(0)))
    assert float(np.asarray(update)) == pytest.approx(-0.15)


@pytest.mark.slow
def test_training_on_a_phantom_learns_it(pristine: Path) -> None:
    """Overfitting the middle of one phantom lowers the loss and finds the edema."""
    dataset = open_dataset(pristine)
    batch = batch_of(load_case(dataset, dataset.cases[0], size=8))
    with jax.default_prng_impl("unsafe_rbg"):  # compiles several times faster than threefry
        step, (state, _) = factory(8, TINY, optax.adam(2e-2), concrete=True)
    step = jax.jit(step, donate_argnums=0)
    losses = []
    for _ in range(40):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    logits = jax.jit(UNet3D(TINY).apply)({"params": state.params}, batch["image"])
    dice = np.asarray(hard_dice(logits.argmax(-1), batch["label"], logits.shape[-1]))
    assert np.isfinite(losses).all()
    assert losses[-1] < 0.6 * losses[0]
    assert dice.shape == (4,)
    assert dice[0] > 0.9
    assert dice[1] > 0.5
    assert int(state.step) == 40
