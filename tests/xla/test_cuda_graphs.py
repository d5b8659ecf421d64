"""CUDA graphs are counted as XLA makes them: against the thunks that it dumps, and on texts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import memplan
from memplan.hardware import catalog
from memplan.program.lowerable import Lowerable
from memplan.xla.cuda_graphs import Launches, has_own_rule, launches
from memplan.xla.target import Target
from models.resnet import ResNetConfig
from models.train import resnet_step
from tests.dense import step as dense_step
from tests.hlo import read_module
from tests.xla import steps
from tests.xla.small_modules import ADD, BIG, HOST, chain, module
from tests.xla.thunks import Thunk, dump_options, dumped_thunks

_LAUNCHED = {"kCustomKernel", "kCopy", "kConvolution", "kCublasLtMatmul"}
WIDTH = 2048


def dense() -> tuple[Any, tuple[Any, ...]]:
    weights = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * 12
    return dense_step, (weights, jax.ShapeDtypeStruct((8 * WIDTH, WIDTH), jnp.float32))


def resnet() -> tuple[Any, tuple[Any, ...]]:
    return resnet_step(128, 64, 14, ResNetConfig(filters=32, classes=5))


def in_xla(folder: Path) -> Launches:
    """Of a program without loops."""
    thunks = dumped_thunks(folder, after_passes=True)
    sizes = tuple(len(thunk.inside) for thunk in thunks if thunk.kind == "kCommandBuffer")
    return Launches(sizes, len(sizes), sum(map(_singles, thunks)))


def _singles(thunk: Thunk) -> int:
    return (
        sum(node.kind in _LAUNCHED for node in thunk.walk) if thunk.kind != "kCommandBuffer" else 0
    )


@pytest.mark.gpu_aot
@pytest.mark.parametrize(
    "device", ["v100", *(pytest.param(name, marks=pytest.mark.slow) for name in ("a100", "h100"))]
)
@pytest.mark.parametrize(
    ("built", "shares"),
    [(dense, (1, 0.6)), pytest.param(resnet, (1, 0.5), marks=pytest.mark.slow)],
    ids=["dense", "resnet"],
)
def test_a_step_and_its_plan(
    built: Any, shares: tuple[float, ...], device: str, tmp_path: Path
) -> None:
    step, args = built()
    budget: int | str = "100%"
    for share in shares:
        budget = int(share * budget) if isinstance(budget, int) else budget
        folder = tmp_path / str(share)
        options = dump_options(folder)
        planned = memplan.jit(
            step,
            device=device,
            budget=budget,
            split=False,
            donate_argnums=0,
            compiler_options=options,
        ).plan(*args)
        report, expected = planned.report, in_xla(folder)
        budget = report.compiled_peak_bytes or 0
        assert (report.cuda_graphs, report.single_launches) == (expected.graphs, expected.singles)
        assert launches(planned._outcome.executable.module, catalog.named(device)) == expected
        assert bool(report.copies_found) == (share < 1)
        if built is dense:
            assert (expected.graphs == 1) == (share == 1)


@pytest.mark.gpu_aot
@pytest.mark.parametrize(
    ("device", "built"),
    [
        pytest.param("h100", partial(steps.pooling, 64, 4), marks=pytest.mark.slow),
        ("v100", partial(steps.updating, 0)),
        ("h100", partial(steps.scanned, 64, 4)),
        ("v100", partial(steps.branching, 64, 4)),
        ("v100", partial(steps.accumulating, 64, 4)),
    ],
    ids=["pooling", "updating", "scanned", "branching", "accumulating"],
)
def test_steps_of_other_kinds_are_right_or_not_told(
    built: Any, device: str, tmp_path: Path
) -> None:
    step, args = built()
    target = Target(catalog.named(device), described=True)
    compiled = target.compile(
        Lowerable(step, args, {}, {"donate_argnums": 0}), dump_options(tmp_path)
    )
    prediction, kinds = (
        launches(compiled.module, target.device),
        set(_kinds(dumped_thunks(tmp_path, "", True))),
    )
    assert (prediction is None) == bool(kinds & {"kDynamicSliceFusion", "kConditional"})
    assert prediction is None or prediction == in_xla(tmp_path)


def _kinds(thunks: list[Thunk]) -> list[str]:
    return [node.kind for thunk in thunks for node in thunk.walk]


def told(entry: str, bodies: str = ADD) -> Launches | None:
    return launches(read_module(module(entry, bodies)), catalog.named("v100"))


ROOT = f"ROOT %root = {BIG} add-dependency(%a, %b)"
COPY_START = f"%out = ({HOST}, {BIG}, u32[]) copy-start(%a)"
COPY_DONE = f"%host = {HOST} copy-done(%out)"


@pytest.mark.parametrize("count", [1, 4, 5, 9])
def test_a_graph_has_five_launches_or_more(count: int) -> None:
    is_graph = count >= 5
    expected = Launches((count,) * is_graph, int(is_graph), 0 if is_graph else count)
    assert told("\n".join([chain(count, "k"), ROOT])) == expected


def test_a_start_and_a_done_each_cut_a_graph() -> None:
    parts = [chain(6, "k"), COPY_START, chain(4, "l"), COPY_DONE, chain(5, "m"), ROOT]
    assert told("\n".join(parts)) == Launches((6, 5), 2, 4 + 1)


def test_a_convolution_cuts_a_graph_and_a_product_does_not() -> None:
    def call(target: str) -> str:
        return f'%call = {BIG} custom-call(%a, %b), custom_call_target="{target}"'

    def around(target: str) -> Launches | None:
        return told("\n".join([chain(5, "k"), call(target), chain(2, "l"), ROOT]))

    assert around("__cublas$lt$matmul") == around("__cublas$gemm") == Launches((8,), 1, 0)
    assert around("__cudnn$convForward") == Launches((5,), 1, 3)
    assert around("somebody_elses") is None


def test_a_loop_has_graphs_of_its_own_in_every_trip() -> None:
    loop = f"""
%loop (p: {BIG}) -> {BIG} {{
  %a = {BIG} parameter(0)
  %b = {BIG} bitcast(%a)
{chain(5, "x")}
  ROOT %last = {BIG} copy(%a)
}}
"""
    called = f"%while = {BIG} while(%a), condition=%loop, body=%loop"
    trips = ', backend_config={"known_trip_count":{"n":"3"}}'
    assert told(
        "\n".join([chain(4, "k"), called + trips, chain(7, "l"), ROOT]), ADD + loop
    ) == Launches((6, 7), 4, 4)
    assert told("\n".join([called, ROOT]), ADD + loop) is None


def test_a_setting_of_the_user_is_another_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    assert not has_own_rule({}) and not has_own_rule({"xla_dump_to": ""})
    assert has_own_rule({"xla_gpu_graph_min_graph_size": 1})
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=x --xla_gpu_enable_command_buffer=")
    assert has_own_rule({})
