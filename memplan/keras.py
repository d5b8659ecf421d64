"""Keras 3 on jax: `model.fit` within a device-memory budget."""

from __future__ import annotations

from typing import Any, Unpack

import jax

from memplan import api
from memplan.api import StepOptions, refuse_unknown
from memplan.errors import MemplanError, UnsupportedProgramError
from memplan.libraries import planned_instead
from memplan.report.model import Report
from memplan.stages import Planned, PlannedJit
from memplan.units import Size

try:
    import keras
except ModuleNotFoundError as error:
    raise ImportError(
        f"memplan.keras needs Keras on jax, and there is no module {error.name!r}. Install the extra (pip install "
        "'memplan[keras]'), and set KERAS_BACKEND=jax before Keras is imported first."
    ) from error

__all__ = ["PlannedModel", "plan"]

_STATE = ("trainable_variables", "non_trainable_variables", "optimizer_variables", "metrics_variables")


def plan(model: keras.Model, *, budget: Size = None, **options: Unpack[StepOptions]) -> PlannedModel:
    """Plan the training step of a compiled model: from now on `fit` and `train_on_batch` keep the budget.

    The step is planned when it first runs, once for each shape of batches. Only this model changes: `evaluate` and
    `predict` stay Keras' own, and so do other models.

    Args:
      model: after `model.compile`; it need not be built.
      budget, options: `host_budget`, `device`, `planner`, `plan`, `verify`, `split`, `topology`, `between_hosts`,
        `pin`, `keep_unused` and `compiler_options`, as for `memplan.jit`.

    Raises:
      BudgetError, UnknownDeviceError: at once, where the request makes no sense.
      MemplanError: Keras has another backend than jax, or the model is not compiled, or runs eagerly.
      UnsupportedProgramError: the model makes its own train function.
      InfeasibleBudgetError: from `fit` and `train_on_batch`, where no plan fits; the model is as it was.
    """
    refuse_unknown("memplan.keras.plan", StepOptions, options)
    if keras.backend.backend() != "jax":
        raise MemplanError(
            f"Keras runs on {keras.backend.backend()}, and memplan plans on jax. Set KERAS_BACKEND=jax before Keras is "
            "imported first."
        )
    if keras.config.is_nnx_enabled():
        raise MemplanError(
            "Keras runs on Flax NNX (KERAS_NNX_ENABLED), which memplan does not plan. Unset the variable."
        )
    if not isinstance(model, keras.Model):
        raise TypeError(f"memplan.keras.plan takes a keras.Model, and {model!r:.80} is none.")
    if not model.compiled:
        raise MemplanError("the model is not compiled. Call model.compile(optimizer, loss) before memplan.keras.plan.")
    if type(model).make_train_function is not keras.Model.make_train_function:
        raise UnsupportedProgramError(
            f"{type(model).__name__} makes its own train function, whose steps memplan does not know. Override "
            "train_step instead, or give what that function compiles to memplan.jit."
        )
    _refuse_eager(model)
    return PlannedModel(model, budget, options)


def _refuse_eager(model: keras.Model) -> None:
    if model.run_eagerly or not model.jit_compile:
        raise MemplanError(
            "the model is compiled with run_eagerly=True or jit_compile=False, or has layers that Keras does not "
            "compile: without a compiled step there is nothing to plan. Call model.compile(..., jit_compile=True)."
        )


class PlannedModel:
    """What `memplan.keras.plan` returns: the plans of a model's training step."""

    def __init__(self, model: keras.Model, budget: Size, options: StepOptions):
        self._model, self._budget, self._options = model, budget, options
        self._step: PlannedJit = api.jit(model.train_step, budget=budget, **options)  # refuses what makes no sense
        model.train_function = None  # the next one is made by way of `_make_function`
        model._make_function = self._make_function

    def _make_function(self, step: Any, **kwargs: Any) -> Any:
        """Keras' own `_make_function`, which calls a step for each batch, with the training step planned."""
        if getattr(step, "__wrapped__", step) == self._model.train_step:
            _refuse_eager(self._model)
            self._step = planned_instead(step, self._budget, self._options)
            step = self._train_step
        return type(self._model)._make_function(self._model, step, **kwargs)

    def _train_step(self, state: Any, data: Any) -> Any:
        try:
            return self._step(state, data)
        except Exception:  # `fit` has taken the variables from the model
            if not any(leaf.is_deleted() for leaf in jax.tree.leaves(state)):
                self._model._jax_state = dict(zip(_STATE, state, strict=True))
                self._model.jax_state_sync()
            raise

    def plan(self, x: Any, y: Any = None, sample_weight: Any = None) -> Planned:
        """Plan for batches like this one (arrays or `jax.ShapeDtypeStruct`s); runs nothing, but builds the model."""
        batch = keras.utils.pack_x_y_sample_weight(x, y, sample_weight)
        self._model._symbolic_build(data_batch=batch)
        self._model.make_train_function()
        return self._step.plan(self._model._get_jax_state(**dict.fromkeys(_STATE, True)), batch)

    @property
    def report(self) -> Report:
        """Of the plan so far; if there are several, for several shapes, of the one with the largest arguments.

        Raises:
          MemplanError: nothing was planned yet.
        """
        return self._step.report
