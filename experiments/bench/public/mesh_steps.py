"""Steps of public repositories over eight devices, with the repositories' meshes and shardings.

The meshes consist of CPU devices, and a measure compiles for described GPUs instead. This module
does what the programs do around their steps: it enters the mesh and places the new state.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from experiments.bench.public import equinox_steps, flax_steps
from experiments.bench.public.checkouts import Repository, folder_of, imported
from experiments.bench.public.equinox_steps import EQUINOX
from experiments.bench.public.flax_steps import FLAX
from experiments.bench.public.training import TrainingStep, images

DEVICES = 8
MAXTEXT = Repository(
    "AI-Hypercomputer/maxtext", "e591f30cbbf217ed67ef71263ec0538239f9c3b8", "Apache-2.0"
)
STAND_INS = (  # For MaxText's data, logs, checkpoints, quantization, TPU kernels and DiLoCo.
    "aqt", "datasets", "drjax", "grain", "huggingface_hub", "maxtext.checkpoint_conversion",
    "maxtext.common.checkpointing", "maxtext.input_pipeline", "ml_goodput_measurement",
    "pathwaysutils",
    "sentencepiece", "sympy", "tensorflow", "tensorflow_datasets", "tiktoken", "tokamax",
    "tokenizers", "transformers",
)  # fmt: skip


def _placed(tree: Any, shardings: Any) -> Any:
    """The shapes of a tree with shardings, one for all leaves or one for each."""
    if isinstance(shardings, NamedSharding):
        shardings = jax.tree.map(lambda _: shardings, tree)
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        tree,
        shardings,
    )


def _tokens(batch: int, length: int, rows: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((batch * DEVICES, length), jnp.int32, sharding=rows)


def lm1b(checkouts: Path) -> TrainingStep:
    """Parameters and moments over eight devices, by flax.linen's rules for logical axes."""
    train, config, init_state, step = flax_steps.lm1b_parts(checkouts)
    jax.config.update("jax_num_cpu_devices", DEVICES)
    mesh = Mesh(train.utils.create_device_mesh(config), config.mesh_axes)
    boxed = jax.eval_shape(init_state, jax.random.key(0))
    shardings = train.nn.logical_to_mesh_sharding(
        linen.get_partition_spec(boxed), mesh, config.logical_axis_rules
    )
    state = _placed(train.utils.unbox_logicallypartioned_trainstate(boxed), shardings)
    rows = NamedSharding(mesh, PartitionSpec(*config.data_sharding))
    batch = {"inputs": _tokens(config.per_device_batch_size, config.max_target_length, rows)}

    def kept(*args: Any) -> Any:
        new, metrics = step(*args)
        return jax.lax.with_sharding_constraint(new, shardings), metrics

    return TrainingStep(kept, (state, batch, jax.eval_shape(lambda: jax.random.PRNGKey(3))), (0,))


def gemma(checkouts: Path, file: str) -> TrainingStep:
    """An nnx module on a mesh with explicit axes; also returns captured intermediates."""
    train = flax_steps.example(checkouts, "gemma")
    config = flax_steps.configured(checkouts, "gemma", file)
    jax.config.update("jax_num_cpu_devices", DEVICES)
    mesh = jax.make_mesh(config.get_mesh_shape(DEVICES), config.mesh_axes)
    rules = train.ShardingConfig.fsdp_tp_sharding(
        fsdp_axis_name="fsdp", tensor_parallel_axis_name="tensor"
    )
    with jax.set_mesh(mesh):
        form, state = nnx.split(
            nnx.eval_shape(flax_steps.gemma_objects(train, config, shd_config=rules))
        )
    rows = NamedSharding(mesh, PartitionSpec(config.data_sharding))
    names = ("inputs", "targets", "inputs_position", "inputs_segmentation")
    batch = dict.fromkeys(
        names, _tokens(config.per_device_batch_size, config.max_target_length, rows)
    )

    def step(state: Any, rows: Any) -> Any:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            model, optimizer, keys, metrics = nnx.merge(form, state)
            return train.jax_train_step(model, optimizer, keys, rows, metrics, with_capture=True)

    return TrainingStep(step, (state, batch), (0,))


def parallelism(checkouts: Path, *, batch: int, width: int, depth: int) -> TrainingStep:
    """Data parallelism by constraints inside the step, for an MLP; `batch` rows per device."""
    names = equinox_steps.notebook(checkouts, "parallelism").run(2, 4).names
    eqx, channels = names.eqx, names.channel_size

    def build() -> Any:
        model = eqx.nn.MLP(channels, channels, width, depth, key=jax.random.key(0))
        return equinox_steps.with_moments(eqx, model, names.optim)

    def data() -> Any:
        return images(batch * DEVICES, channels), images(batch * DEVICES, channels)

    def update(built: Any, x: Any, y: Any) -> Any:
        return (names.train_step(*built, x, y),)

    step, (state, *rows), donated = equinox_steps.step_of(eqx, jax.eval_shape, build, data, update)
    return TrainingStep(
        step, (_placed(state, names.model_sharding), *_placed(rows, names.data_sharding)), donated
    )


def maxtext(checkouts: Path, file: str, **values: Any) -> TrainingStep:
    """The step that MaxText compiles ahead of time for a configuration file and values."""
    source = folder_of(checkouts, MAXTEXT, "src")
    ahead = imported(source, "maxtext.trainers.pre_train.train_compile", STAND_INS)
    jax.config.update("jax_num_cpu_devices", DEVICES)
    words = (f"{name}={value}" for name, value in values.items())
    config = ahead.pyconfig.initialize(["", str(source / "maxtext/configs" / file), *words])
    axes = config.mesh_axes
    mesh = Mesh(
        ahead.maxtext_utils.create_device_mesh(config),
        axes,
        axis_types=(AxisType.Auto,) * len(axes),
    )
    (state, batch), _, kept, _, model = ahead.get_shaped_inputs(mesh, config)
    weights, kept = ahead.sharding.maybe_update_params_sharding_with_opt(config, kept)
    input_shardings = ahead.sharding.build_zero1_input_state_mesh_shardings(config, kept, weights)
    rows = ahead.sharding.get_input_data_sharding(config, mesh)
    function, (input_shardings, _), (kept, _), _, donated = (
        ahead.maxtext_utils.get_functional_train_with_signature(
            ahead.train.train_step, rows, input_shardings, model, config, weights
        )
    )
    rules = config.logical_axis_rules

    def step(state: Any, batch: Any) -> Any:
        with (
            jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
            mesh,
            linen.logical_axis_rules(rules),
        ):
            new, metrics = function(state, batch)
            return jax.lax.with_sharding_constraint(new, kept), metrics

    return TrainingStep(step, (_placed(state, input_shardings), batch), (donated,))


@dataclass(frozen=True)
class MeshStep:
    """A step, and the machine that it is compiled for."""

    name: str
    repository: Repository
    path: str  # of the configuration
    build: Callable[[Path], TrainingStep]
    ours: str  # differences from the repository
    device: str = "a100"
    topology: str = "today@1x8"


_GPU = "src/maxtext/configs/gpu/models"
_NO_TE = "XLA's attention, since Transformer Engine is not there"
MESH_STEPS = {
    step.name: step
    for step in (
        MeshStep("maxtext-llama2_7b", MAXTEXT, f"{_GPU}/llama2_7b.yml",
            partial(maxtext, file="gpu/models/llama2_7b.yml", attention="dot_product"), _NO_TE),
        MeshStep("maxtext-mixtral_8x1b", MAXTEXT, f"{_GPU}/mixtral_8x1b.yml",
            partial(maxtext, file="gpu/models/mixtral_8x1b.yml", attention="dot_product",
                    override_model_config=True, base_num_decoder_layers=5),
            f"{_NO_TE}; the file's 5 layers, which its model's 32 would replace"),
        MeshStep("flax-lm1b", FLAX, "examples/lm1b/configs/default.py", lm1b, "nothing"),
        MeshStep("flax-gemma3_270m", FLAX, "examples/gemma/configs/gemma3_270m.py",
            partial(gemma, file="gemma3_270m"), "nothing"),
        MeshStep("equinox-parallelism", EQUINOX, "docs/examples/parallelism.ipynb",
            partial(parallelism, batch=16384, width=2048, depth=16),
            "16 layers of 2048 and 16384 rows on each device, "
            "instead of one layer of 32 and two rows"),
    )
}  # fmt: skip
