"""Steps of google/flax's examples, with their models, steps, optimizers and configurations."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.training import dynamic_scale, train_state

from experiments.bench.public.checkouts import Repository, folder_of, imported
from experiments.bench.public.training import Make, TrainingStep, images, integers, of_one_replica

FLAX = Repository("google/flax", "18f8f311c275d57f46d95e41b15aa97b454754c0", "Apache-2.0")
STAND_INS = (  # For data, logs and checkpoints.
    "tensorflow", "tensorflow_datasets", "tensorflow_text", "sentencepiece", "grain", "sklearn",
    "orbax",
    "clu.checkpoint", "clu.deterministic_data", "clu.metric_writers", "clu.periodic_actions",
    "flax.metrics.tensorboard", "flax.training.checkpoints",
)  # fmt: skip


def example(checkouts: Path, name: str, module: str = "train") -> Any:
    return imported(folder_of(checkouts, FLAX, f"examples/{name}"), module, STAND_INS)


def configured(checkouts: Path, name: str, config: str = "default", **values: Any) -> Any:
    """The example's own configuration with some values replaced."""
    settings = example(checkouts, name, f"configs.{config}").get_config()
    for key, value in values.items():
        setattr(settings, key, value)
    return settings


def imagenet(checkouts: Path, make: Make, *, model: str, batch: int, size: int) -> TrainingStep:
    """A float32 ResNet on images of size x size x 3; batch norm, momentum, weight decay."""
    train = example(checkouts, "imagenet")
    config = configured(checkouts, "imagenet", batch_size=batch)
    rate = train.create_learning_rate_fn(
        config, config.learning_rate * batch / 256, steps_per_epoch=1000
    )
    network = train.create_model(model_cls=getattr(train.models, model), half_precision=False)

    def args() -> Any:
        state = train.create_train_state(jax.random.key(0), config, network, size, rate)
        return state, {
            "image": images(batch, size, size, 3),
            "label": integers(batch, below=train.NUM_CLASSES),
        }

    step = of_one_replica(partial(train.train_step, learning_rate_fn=rate), "batch")
    return TrainingStep(step, make(args), (0,))


def lm1b_parts(
    checkouts: Path, **config_values: Any
) -> tuple[Any, Any, Callable[[Any], Any], Callable[..., Any]]:
    """The module, its configuration, key -> boxed initial state, and the step."""
    train, config = example(checkouts, "lm1b"), configured(checkouts, "lm1b", **config_values)
    rate = train.create_learning_rate_schedule(config.learning_rate, config.warmup_steps)
    sizes = _transformer_sizes(config, jnp.bfloat16 if config.use_bfloat16 else jnp.float32)
    network = train.models.TransformerConfig(deterministic=False, **sizes)
    model = train.models.TransformerLM(network.replace(deterministic=True))
    optimizer = optax.adamw(rate, b1=0.9, b2=0.98, eps=1e-9, weight_decay=config.weight_decay)

    def step(state: Any, batch: Any, key: Any) -> Any:
        return train.train_step(state, batch, network, rate, 0.0, key)

    return train, config, partial(train.utils.init_train_state, model, optimizer, config), step


def lm1b(
    checkouts: Path, make: Make, *, batch: int, tokens: int, **config_values: Any
) -> TrainingStep:
    """A language model (pre-norm decoder, dropout, bfloat16) with AdamW."""
    lengths = {"max_target_length": tokens, "max_eval_target_length": tokens}
    train, config, init_state, step = lm1b_parts(
        checkouts, per_device_batch_size=batch, **lengths, **config_values
    )

    def args() -> Any:
        state = train.utils.unbox_logicallypartioned_trainstate(init_state(jax.random.key(0)))
        return (
            state,
            {"inputs": integers(batch, tokens, below=config.vocab_size, low=1)},
            jax.random.key(3),
        )

    return TrainingStep(step, make(args), (0,))


def wmt(
    checkouts: Path, make: Make, *, batch: int, tokens: int, **config_values: Any
) -> TrainingStep:
    """Translation in float16: dynamic loss scale, shared embeddings, smoothed labels."""
    train = example(checkouts, "wmt")
    config = configured(
        checkouts, "wmt", max_target_length=tokens, max_eval_target_length=tokens, **config_values
    )
    rate = train.create_learning_rate_schedule(config.learning_rate, config.warmup_steps)
    shared = {name: config[name] for name in ("share_embeddings", "logits_via_embedding")}
    network = train.models.TransformerConfig(
        deterministic=False, **shared, **_transformer_sizes(config, jnp.float16)
    )
    model = train.models.Transformer(network.replace(deterministic=True))
    optimizer = optax.adamw(rate, b1=0.9, b2=0.98, eps=1e-9, weight_decay=config.weight_decay)

    def args() -> Any:
        ones = jnp.ones((batch, tokens))
        params = jax.jit(model.init)(jax.random.key(0), ones, ones)["params"]
        state = train.TrainState.create(
            apply_fn=model.apply,
            params=params,
            tx=optimizer,
            dynamic_scale=dynamic_scale.DynamicScale(),
        )
        sources, targets = (
            integers(batch, tokens, below=config.vocab_size, low=1, seed=seed) for seed in (2, 4)
        )
        return state, {"inputs": sources, "targets": targets}, jax.random.key(3)

    def step(state: Any, batch: Any, key: Any) -> Any:
        return train.train_step(state, batch, network, rate, config.label_smoothing, key)

    return TrainingStep(of_one_replica(step, "batch"), make(args), (0,))


def _transformer_sizes(config: Any, dtype: Any) -> dict[str, Any]:
    """The fields of a configuration that the transformers of lm1b and wmt take."""
    same = (
        "emb_dim",
        "num_heads",
        "num_layers",
        "qkv_dim",
        "mlp_dim",
        "dropout_rate",
        "attention_dropout_rate",
    )
    sizes = {name: config[name] for name in (*same, "vocab_size")}
    longest = max(config.max_target_length, config.max_eval_target_length)
    return {**sizes, "output_vocab_size": config.vocab_size, "dtype": dtype, "max_len": longest}


def nlp_seq(
    checkouts: Path, make: Make, *, batch: int, tokens: int, accumulated: int, **sizes: Any
) -> TrainingStep:
    """Tagging of words; gradients accumulate in `optax.MultiSteps` (not the example's)."""
    train = example(checkouts, "nlp_seq")
    words, tags = 20_000, 50  # the example counts them in the data
    config = train.models.TransformerConfig(
        vocab_size=words, output_vocab_size=tags, max_len=tokens, **sizes
    )
    model = train.models.Transformer(config)
    rate = train.create_learning_rate_scheduler(base_learning_rate=train.FLAGS.learning_rate)
    optimizer = optax.adamw(rate, b1=0.9, b2=0.98, eps=1e-9, weight_decay=train.FLAGS.weight_decay)
    repeated = optax.MultiSteps(optimizer, every_k_schedule=accumulated).gradient_transformation()

    def args() -> Any:
        params = model.init(jax.random.key(0), inputs=jnp.ones((tokens, 1)), train=False)["params"]
        state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=repeated)
        inputs = integers(batch, tokens, below=words, low=1)
        targets = integers(batch, tokens, below=tags, low=1)
        return state, {"inputs": inputs, "targets": targets}, jax.random.key(3)

    def step(state: Any, batch: Any, key: Any) -> Any:
        return train.train_step(state, batch, model, rate, key)

    return TrainingStep(of_one_replica(step, "batch"), make(args), (0,))


def ogbg_molpcba(
    checkouts: Path, make: Make, *, graphs: int, nodes: int, edges: int
) -> TrainingStep:
    """A graph network over molecules: gathers, segment sums, dropout."""
    train = example(checkouts, "ogbg_molpcba")
    config = configured(checkouts, "ogbg_molpcba", "default_graph_net", num_classes=128)
    model = train.create_model(config, deterministic=False)
    optimizer = train.create_optimizer(config)

    def molecules() -> Any:
        senders, receivers = (integers(edges, below=nodes, seed=seed) for seed in (2, 4))
        return train.jraph.GraphsTuple(
            nodes=images(nodes, 9), edges=images(edges, 3), senders=senders, receivers=receivers,
            n_node=jnp.full(graphs, nodes // graphs), n_edge=jnp.full(graphs, edges // graphs),
            globals=integers(graphs, config.num_classes, below=2).astype(jnp.float32),
        )  # fmt: skip

    def args() -> Any:
        keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
        params = jax.jit(model.init)(keys, train.replace_globals(molecules()))
        state = train.train_state.TrainState.create(
            apply_fn=model.apply, params=params, tx=optimizer
        )
        return state, molecules(), {"dropout": jax.random.key(3)}

    return TrainingStep(train.train_step, make(args), (0,))


def seq2seq(checkouts: Path, make: Make, *, batch: int, digits: int, width: int) -> TrainingStep:
    """Sums of long numbers, digit by digit: two LSTMs in loops; the second samples its inputs."""
    train = example(checkouts, "seq2seq")
    train.FLAGS.hidden_size = width
    table = train.CTable("0123456789+= ", digits)

    def args() -> Any:
        state = train.get_train_state(jax.random.key(0), table)
        lengths = {"query": table.max_input_len, "answer": table.max_output_len}
        drawn = {
            name: integers(batch, length, below=table.vocab_size)
            for name, length in lengths.items()
        }
        sums = {name: jax.nn.one_hot(tokens, table.vocab_size) for name, tokens in drawn.items()}
        return state, sums, jax.random.key(3)

    def step(state: Any, sums: Any, key: Any) -> Any:
        return train.train_step(state, sums, key, table.eos_id)

    return TrainingStep(step, make(args), (0,))


def vae(checkouts: Path, make: Make, *, batch: int, latents: int) -> TrainingStep:
    """A variational autoencoder of dense layers on images of 784 bits, Adam."""
    train = example(checkouts, "vae")
    model = train.models.model(latents)

    def args() -> Any:
        params = model.init(jax.random.key(0), jnp.ones((1, 784)), jax.random.key(1))["params"]
        state = train.train_state.TrainState.create(
            apply_fn=model.apply, params=params, tx=optax.adam(1e-3)
        )
        return state, integers(batch, 784, below=2).astype(jnp.float32), jax.random.key(3)

    def step(state: Any, bits: Any, key: Any) -> Any:
        return train.train_step(state, bits, key, latents)

    return TrainingStep(step, make(args), (0,))


def gemma_objects(train: Any, config: Any, **sizes: Any) -> Callable[[], Any]:
    """Returns a function that creates the configured model, its optimizer, keys and metrics."""
    network = train.transformer_lib.TransformerConfig.from_version_name(
        config.transformer_name, **{"num_embed": config.vocab_size, "dtype": jnp.bfloat16, **sizes}
    )
    rate = train.create_learning_rate_schedule(config.learning_rate, config.warmup_steps)
    optimizer = optax.adamw(rate, b1=0.9, b2=0.98, eps=1e-9, weight_decay=config.weight_decay)

    def objects() -> Any:
        keys = nnx.Rngs(params=config.seed, dropout=config.seed)
        model = train.transformer_lib.Transformer(network, rngs=keys)
        metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy())
        return model, nnx.Optimizer(model, tx=optimizer, wrt=nnx.Param), keys, metrics

    return objects


def gemma(
    checkouts: Path, make: Make, *, version: str, batch: int, tokens: int, **sizes: Any
) -> TrainingStep:
    """Gemma as an nnx module with explicit state: bfloat16 on float32 weights, sliding windows."""
    train = example(checkouts, "gemma")
    config = configured(checkouts, "gemma", max_target_length=tokens, transformer_name=version)
    objects = gemma_objects(train, config, **sizes)
    form, _ = nnx.split(nnx.eval_shape(objects))

    def args() -> Any:
        words = integers(batch, tokens, below=config.vocab_size, low=1)
        places = jnp.broadcast_to(jnp.arange(tokens), words.shape)
        rows = {"inputs": words, "targets": jnp.roll(words, -1, axis=1), "inputs_position": places}
        return nnx.state(objects()), {**rows, "inputs_segmentation": jnp.ones_like(words)}

    def step(state: Any, rows: Any) -> Any:
        model, optimizer, keys, metrics = nnx.merge(form, state)
        return train.jax_train_step(model, optimizer, keys, rows, metrics)[0]

    return TrainingStep(step, make(args), (0,))
