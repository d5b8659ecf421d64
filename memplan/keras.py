"""`model.fit` of Keras 3 on jax, within a device-memory budget."""

from __future__ import annotations

from typing import Any, Unpack

import jax

from memplan import api
from memplan.api import StepOptions, refuse_unknown
from memplan.errors import MemplanError, UnsupportedProgramError
from memplan.libraries import PlainStep, planned_instead
from memplan.report.model import Report
from memplan.stages import Planned, PlannedJit
from memplan.units import Size

try:
    import keras
except ModuleNotFoundError as error:
    raise ImportError(
        f"memplan.keras needs Keras on jax, and there is no module {error.name!r}. Install the "
        "extra "
        "(pip install 'memplan[keras]'), and set KERAS_BACKEND=jax before Keras is imported first."
    ) from error

__all__ = ["PlannedModel", "plan"]

# The parts of a Keras model's state, in the order in which its step takes them.
_STATE = (
    "trainable_variables",
    "non_trainable_variables",
    "optimizer_variables",
    "metrics_variables",
)


def plan(
    model: keras.Model, *, budget: Size = None, **options: Unpack[StepOptions]
) -> PlannedModel:
    """Plan the training step of a compiled model: `fit` and `train_on_batch` then keep the budget.

    The step is planned when it first runs, once for each shape of batches. Only this model's
    training changes, not its `evaluate` and `predict`, and no other model.

    Args:
      model: a model after `model.compile`; it need not be built.
      budget: as for `memplan.jit`.
      options: `host_budget`, `device`, `planner`, `plan`, `verify`, `split`, `topology`,
        `between_hosts`, `pin`, `keep_unused` and `compiler_options`, as for `memplan.jit`.

    Raises:
      BudgetError, UnknownDeviceError: at once, if the request is invalid.
      MemplanError: the backend of Keras is not jax, or the model is not compiled or runs eagerly.
      UnsupportedProgramError: the model has its own `make_train_function`.
      InfeasibleBudgetError: from `fit` and `train_on_batch`, if no plan fits; the model is
        unchanged.

    Example:
      >>> import keras, memplan, numpy as np  # with KERAS_BACKEND=jax
      >>> model = keras.Sequential([keras.layers.Dense(2)])
      >>> model.compile("sgd", "mse")
      >>> planned = memplan.keras.plan(model, budget="1MiB")
      >>> loss = model.train_on_batch(np.ones((3, 4)), np.ones((3, 2)))
      >>> planned.report.compiled_peak_bytes <= 2**20
      True
    """
    refuse_unknown("memplan.keras.plan", StepOptions, options)
    if keras.backend.backend() != "jax":
        raise MemplanError(
            f"Keras runs on {keras.backend.backend()}, and memplan plans on jax. Set "
            "KERAS_BACKEND=jax before Keras is imported first."
        )
    if keras.config.is_nnx_enabled():
        raise MemplanError(
            "Keras runs on Flax NNX (KERAS_NNX_ENABLED), which memplan does not plan. Unset the "
            "variable."
        )
    if not isinstance(model, keras.Model):
        raise TypeError(f"memplan.keras.plan takes a keras.Model, and {model!r:.80} is none.")
    if not model.compiled:
        raise MemplanError(
            "the model is not compiled. Call model.compile(optimizer, loss) before "
            "memplan.keras.plan."
        )
    if type(model).make_train_function is not keras.Model.make_train_function:
        raise UnsupportedProgramError(
            f"{type(model).__name__} makes its own train function, whose steps memplan does not "
            "know. Override train_step instead, or give what that function compiles to memplan.jit."
        )
    _refuse_eager(model)
    return PlannedModel(model, budget, options)


def _refuse_eager(model: keras.Model) -> None:
    """Raise MemplanError for a model that has no compiled step."""
    if model.run_eagerly or not model.jit_compile:
        raise MemplanError(
            "the model is compiled with run_eagerly=True or jit_compile=False, or has layers that "
            "Keras does not compile: without a compiled step there is nothing to plan. Call "
            "model.compile(..., jit_compile=True)."
        )


class PlannedModel:
    """The plans of a model's training step, as `memplan.keras.plan` returns them."""

    def __init__(self, model: keras.Model, budget: Size, options: StepOptions):
        self._model = model
        self._budget = budget
        self._options = options
        # Raises for an invalid request. `_make_function` replaces it.
        self._step: PlannedJit[..., Any] = api.jit(model.train_step, budget=budget, **options)
        model.train_function = None  # Keras makes the next one by `_make_function`
        model._make_function = self._make_function

    def _make_function(self, step: Any, **kwargs: Any) -> Any:
        """Keras' `_make_function`, which calls a step for each batch; plans the training step."""
        if getattr(step, "__wrapped__", step) == self._model.train_step:
            _refuse_eager(self._model)
            self._step = planned_instead(step, self._budget, self._options)
            step = self._train_step
        return type(self._model)._make_function(self._model, step, **kwargs)

    def _train_step(self, state: Any, data: Any) -> Any:
        try:
            return self._step(state, data)
        except Exception:
            # Return the variables to the model, from which `fit` took them.
            if not any(leaf.is_deleted() for leaf in jax.tree.leaves(state)):
                self._model._jax_state = dict(zip(_STATE, state, strict=True))
                self._model.jax_state_sync()
            raise

    def plan(self, x: Any, y: Any = None, sample_weight: Any = None) -> Planned[Any]:
        """Plan for batches like this one (arrays or `jax.ShapeDtypeStruct`s).

        Builds the model, but runs nothing.
        """
        arguments = self._arguments(x, y, sample_weight)  # Keras makes `_step` there
        return self._step.plan(*arguments)

    def _arguments(self, *batch: Any) -> tuple[Any, Any]:
        """The arguments of the training step for a batch; builds the model and the step."""
        data = keras.utils.pack_x_y_sample_weight(*batch)
        self._model._symbolic_build(data_batch=data)
        self._model.make_train_function()
        return self._model._get_jax_state(**dict.fromkeys(_STATE, True)), data

    @property
    def report(self) -> Report:
        """The report of the plan. Of several, for several shapes, the one with most input bytes.

        Raises:
          MemplanError: nothing was planned yet.
        """
        return self._step.report


def plain_step(step: Any, args: tuple[Any, ...]) -> PlainStep | None:
    """The training step of a compiled model, or of one that `plan` planned.

    Args:
      step: the model, or what `plan` returned for it.
      args: a batch: x, y and perhaps weights of the samples.

    Returns:
      None if the step is neither.
    """
    if not isinstance(step, (keras.Model, PlannedModel)):
        return None
    planned = step if isinstance(step, PlannedModel) else plan(step)
    arguments = planned._arguments(*args)
    request = planned._step._request if planned is step else None
    return PlainStep.inside(planned._step._jitted, arguments, request)
