"""Steps of the example notebooks of patrick-kidger/equinox.

Runs the cells that neither load data nor train. An Equinox model is a tree of arrays and static
parts: a step takes the arrays and closes over the static part.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from experiments.bench.public.checkouts import Notebook, Repository, folder_of
from experiments.bench.public.training import Make, TrainingStep, images, integers, of_one_replica

EQUINOX = Repository(
    "patrick-kidger/equinox", "9336d820b2ef66b360fc6cb3611b3da5cefbb14d", "Apache-2.0"
)
STAND_INS = ("torch", "torchvision", "datasets", "transformers", "tqdm", "matplotlib", "diffrax")


def notebook(checkouts: Path, name: str) -> Notebook:
    return Notebook(folder_of(checkouts, EQUINOX, "docs/examples") / f"{name}.ipynb", STAND_INS)


def step_of(
    eqx: Any, make: Make, build: Callable[[], Any], data: Callable[[], Any], update: Any
) -> TrainingStep:
    """A step on the arrays of `build()`; `update(built, *data())` returns the new tree first."""
    static: list[Any] = []

    def arrays() -> Any:
        built = build()
        static.append(eqx.filter(built, eqx.is_array, inverse=True))
        return eqx.filter(built, eqx.is_array)

    def step(state: Any, *args: Any) -> Any:
        built, *more = update(eqx.combine(state, static[0]), *args)
        return eqx.filter(built, eqx.is_array), *more

    return TrainingStep(step, (make(arrays), *make(data)), (0,))


def with_moments(eqx: Any, model: Any, optimizer: optax.GradientTransformation) -> Any:
    return model, optimizer.init(eqx.filter(model, eqx.is_inexact_array))


def vision_transformer(
    checkouts: Path, make: Make, *, batch: int, size: int, **sizes: int
) -> TrainingStep:
    """An image classifier under `jax.vmap`; dropout with a key per image, AdamW."""
    book = notebook(checkouts, "vision_transformer").run(1, 2)
    book.set(batch_size=batch, image_size=(size, size, 3), height=size, width=size, **sizes)
    names = book.set(num_patches=(size // book.names.patch_size) ** 2).run(6, 8, 10, 11).names
    eqx, optimizer = names.eqx, optax.adamw(names.lr, b1=names.beta1, b2=names.beta2)
    named = (
        "embedding_dim",
        "hidden_dim",
        "num_heads",
        "num_layers",
        "dropout_rate",
        "patch_size",
        "num_patches",
    )
    shape = {name: getattr(names, name) for name in (*named, "num_classes")}

    def build() -> Any:
        return with_moments(eqx, names.VisionTransformer(**shape, key=jax.random.key(0)), optimizer)

    def data() -> Any:
        keys = jax.random.split(jax.random.key(3), batch)
        return images(batch, 3, size, size), integers(batch, below=names.num_classes), keys

    def update(built: Any, images: Any, labels: Any, keys: Any) -> Any:
        model, moments, loss = names.step_model(built[0], optimizer, built[1], images, labels, keys)
        return (model, moments), loss

    return step_of(eqx, make, build, data, update)


def bert(checkouts: Path, make: Make, *, batch: int, tokens: int, **sizes: int) -> TrainingStep:
    """A float32 classifier of sentences under `jax.vmap`; dropout, clipped gradients, Adam."""
    names = notebook(checkouts, "bert").run(3, 5, 6, 7, 8, 9, 10, 17).names
    eqx = names.eqx
    config = {
        "vocab_size": 30522, "max_position_embeddings": 512, "type_vocab_size": 2,
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1, **sizes,
    }  # fmt: skip
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-5))

    def build() -> Any:
        model = names.BertClassifier(config=config, num_classes=2, key=jax.random.key(0))
        return with_moments(eqx, model, optimizer)

    def data() -> Any:
        words = integers(batch, tokens, below=config["vocab_size"], low=1)
        labels = integers(batch, below=2)
        return {
            "token_ids": words,
            "segment_ids": jnp.zeros_like(words),
            "label": labels,
        }, jax.random.key(3)

    def update(built: Any, inputs: Any, key: Any) -> Any:
        loss, model, moments, key = names.make_step(built[0], inputs, built[1], key, optimizer)
        return (model, moments), loss, key

    step, *args = step_of(eqx, make, build, data, update)
    return TrainingStep(of_one_replica(step, "devices"), *args)


def convolutional_gan(checkouts: Path, make: Make, *, batch: int, filters: int) -> TrainingStep:
    """A discriminator's step, then a generator's; batch normalization with explicit state.

    Images are 64 x 64; the notebook uses their width as the number of filters, too.
    """
    book = notebook(checkouts, "deep_convolutional_gan").run(1, 2)
    names = book.set(batch_size=batch).run(7, 9, 11).names
    shape = names.height, filters, names.channels
    eqx, optimizer = names.eqx, optax.adam(names.lr, b1=names.beta1, b2=names.beta2)

    def build() -> Any:
        generator_key, discriminator_key = jax.random.split(jax.random.key(0))
        generator = names.Generator(names.latent_size, shape, generator_key)
        discriminator = names.Discriminator(shape, discriminator_key)
        moments = [
            optimizer.init(eqx.filter(network, eqx.is_inexact_array))
            for network in (generator, discriminator)
        ]
        states = eqx.nn.State(generator), eqx.nn.State(discriminator)
        return generator, discriminator, *states, *moments

    def data() -> Any:
        return images(batch, names.channels, names.height, names.width), jax.random.key(3)

    def update(built: Any, images: Any, key: Any) -> Any:
        gen, dis, gen_state, dis_state, gen_moments, dis_moments = built
        dis_loss, dis, dis_moments, gen_state, dis_state, key = names.step_discriminator(
            dis, gen, images, optimizer, dis_moments, gen_state, dis_state, key
        )
        gen_loss, gen, gen_moments, dis_state, gen_state, key = names.step_generator(
            gen, dis, optimizer, gen_moments, dis_state, gen_state, key
        )
        built = gen, dis, gen_state, dis_state, gen_moments, dis_moments
        return built, dis_loss, gen_loss, key

    return step_of(eqx, make, build, data, update)


def unet_diffusion(
    checkouts: Path, make: Make, *, batch: int, size: int, width: int, levels: tuple[int, ...]
) -> TrainingStep:
    """The U-Net of unet.ipynb in the denoising step of score_based_diffusion.ipynb; AdaBelief."""
    unet = notebook(checkouts, "unet").run(1).names
    names = notebook(checkouts, "score_based_diffusion").run(1, 5, 9).names
    eqx, optimizer = names.eqx, optax.adabelief(3e-4)

    def build() -> Any:
        model = unet.UNet(
            data_shape=(3, size, size), is_biggan=False, dim_mults=list(levels), hidden_size=width,
            heads=4,
            dropout_rate=0.0,  # the other notebook gives its model no key
            dim_head=32, num_res_blocks=2, attn_resolutions=[size // 2], key=jax.random.key(0),
        )  # fmt: skip
        return with_moments(eqx, model, optimizer)

    def data() -> Any:
        return images(batch, 3, size, size), jax.random.key(3)

    def update(built: Any, images: Any, key: Any) -> Any:
        loss, model, key, moments = names.make_step(
            built[0],
            lambda t: 1 - jnp.exp(-t),
            lambda t: t,
            images,
            10.0,
            key,
            built[1],
            optimizer.update,
        )
        return (model, moments), loss, key

    return step_of(eqx, make, build, data, update)
