"""The pytest plugin: what it costs those who don't use it, what it measures, and how its snapshots fail."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies

import memplan
from memplan.report.model import LiveValue, Report
from memplan.testing import assert_peak_below, memplan_bytes
from memplan.xla.gpu import platform
from tests.cli.command import REPORT
from tests.xla.steps import dense

pytest_plugins = "pytester"

ROOT = Path(__file__).parents[1]
MIB = 2**20
HELD = LiveValue("net/layer_0", 500 * MIB, "float32[500,512,512]", "net.py:3", "")
NOW = replace(
    REPORT, live_at_peak=(HELD,), versions=(("jax", "0.11.2"),), planning_s=0.5, preparation_s=3.0
)
GROWN = replace(
    NOW,
    compiled_peak_bytes=524 * MIB,
    live_at_peak=(replace(HELD, nbytes=512 * MIB, source="net.py:8"),),
)
STEP = """
    import jax, jax.numpy as jnp
    SIZE = 128

    def step(weights, x):
        def loss(weights):
            y = x
            for weight in weights:
                y = jnp.tanh(y @ weight)
            return (y**2).mean()
        return jax.tree.map(lambda a, b: a - b, weights, jax.grad(loss)(weights))

    ARGS = [jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32)] * 2, jax.ShapeDtypeStruct((4096, SIZE), jnp.float32)
"""


def run(pytester: pytest.Pytester, *words: str) -> pytest.RunResult:
    return pytester.runpytest_inprocess(
        "-p", "memplan.testing", "-p", "no:xdist", "-p", "no:cacheprovider", *words
    )


@pytest.fixture
def answered(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """Tests whose steps have the report `now.json`; what was asked for them."""
    requests: list[dict[str, object]] = []

    def report(step: object, args: object, **options: object) -> Report:
        requests.append(options)
        return Report.load_json(pytester.path / "now.json")

    monkeypatch.setattr(memplan.api, "report", report)
    NOW.save_json(pytester.path / "now.json")
    pytester.makepyfile(
        test_steps="""
        import pytest

        class TestNet:
            @pytest.mark.parametrize("size", ["small", "a/b"])
            def test_step(self, memplan_snapshot, size):
                memplan_snapshot(None, ())
                memplan_snapshot(None, (), "v100", bytes=50, ms=50, budget="1GiB")
        """
    )
    return requests


def test_whoever_does_not_use_it_imports_nothing(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makepyfile("""
        import sys

        def test_of_somebody_else():
            assert "memplan.testing" in sys.modules
            assert not {"jax", "numpy", "scipy", "rich", "memplan.io"} & set(sys.modules)
    """)
    pytester.runpytest_subprocess("-p", "memplan.testing", "-W", "error").assert_outcomes(passed=1)


def test_snapshots_are_written_when_asked_for_alone(
    pytester: pytest.Pytester, answered: list[dict[str, object]]
) -> None:
    result = run(pytester)
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(
        ["*there is no snapshot *__memplan__/test_steps/*pytest --memplan-update*commit it."]
    )
    assert not answered and not (pytester.path / "__memplan__").exists()

    run(pytester, "--memplan-update").assert_outcomes(passed=2)
    folder = pytester.path / "__memplan__" / "test_steps"
    written = {path.name: path.read_bytes() for path in folder.iterdir()}
    of_small, of_path = (
        sorted(name for name in written if part in name) for part in ("[small]", "[a_b]")
    )
    assert of_small == ["TestNet.test_step[small]-2.json", "TestNet.test_step[small].json"]
    assert len(of_path) == 2 and len(written) == 4
    assert Report.load_json(folder / "TestNet.test_step[small].json") == replace(
        NOW, planning_s=0, preparation_s=None
    )
    assert answered[:2] == [{"device": "a100"}, {"device": "v100", "budget": "1GiB"}]

    replace(NOW, planning_s=0.7, preparation_s=9.0).save_json(pytester.path / "now.json")
    run(pytester).assert_outcomes(passed=2)
    run(pytester, "--memplan-update").assert_outcomes(passed=2)
    assert written == {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_step_that_grew_fails_with_the_difference(
    pytester: pytest.Pytester, answered: list[dict[str, object]]
) -> None:
    run(pytester, "--memplan-update", "-k", "small").assert_outcomes(passed=1)
    GROWN.save_json(pytester.path / "now.json")
    result = run(pytester, "-k", "small")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*the step grew: its compiled bytes rose by 2.344 %, from 512.0 MiB to 524.0 MiB (2 % are allowed).",
            "*+12.0 MiB *larger *float32[[]500,512,512[]] *net.py:8 *net/layer_0",
            "*To accept it, run `pytest --memplan-update`, which writes *test_step[[]small[]].json.",
        ]
    )
    result.stdout.no_fnmatch_line("*memplan/testing.py*")
    run(pytester, "--memplan-update", "-k", "small").assert_outcomes(passed=1)
    run(pytester, "-k", "small").assert_outcomes(passed=1)


def test_a_step_that_shrank_passes(
    pytester: pytest.Pytester, answered: list[dict[str, object]]
) -> None:
    GROWN.save_json(pytester.path / "now.json")
    run(pytester, "--memplan-update", "-k", "small").assert_outcomes(passed=1)
    NOW.save_json(pytester.path / "now.json")
    run(pytester, "-k", "small").assert_outcomes(passed=1)


def test_a_snapshot_of_another_device_or_none_at_all_is_told(
    pytester: pytest.Pytester, answered: list[dict[str, object]]
) -> None:
    run(pytester, "--memplan-update", "-k", "small").assert_outcomes(passed=1)
    path = pytester.path / "__memplan__" / "test_steps" / "TestNet.test_step[small].json"
    replace(NOW, device="a100").save_json(path)
    run(pytester, "-k", "small").stdout.fnmatch_lines(
        ["*ReportError*another device: a100, not v100*"]
    )
    path.write_text(path.read_text()[:100])
    run(pytester, "-k", "small").stdout.fnmatch_lines(["*ReportError*holds no report*not JSON*"])


def test_it_tells_its_option(pytester: pytest.Pytester) -> None:
    result = run(pytester, "--help", "--fixtures")
    result.stdout.fnmatch_lines(["memplan:", "*--memplan-update*"])


@pytest.mark.gpu_aot
def test_a_step_takes_what_the_compiler_says() -> None:
    step, args = dense(64, 2)
    planned = memplan.jit(step, device="a100", donate_argnums=0)
    nbytes = memplan_bytes(step, args)
    assert nbytes == memplan_bytes(planned, args) == planned.plan(*args).report.compiled_peak_bytes
    assert memplan_bytes(step, args, donate_argnums=()) > nbytes
    assert memplan_bytes(step, args, budget=nbytes * 9 // 10) <= nbytes * 9 // 10
    assert_peak_below(planned, args, nbytes)
    assert_peak_below(planned, args, "1%")
    with pytest.raises(
        AssertionError, match=rf"takes {nbytes} bytes on a100, 1 more than {nbytes - 1}\.\n"
    ):
        assert_peak_below(planned, args, nbytes - 1)
    with pytest.raises(memplan.MemplanError, match="with its own device and options"):
        memplan_bytes(planned, args, device="v100")


@pytest.mark.gpu_aot
def test_a_step_that_exceeds_the_device_is_measured_as_it_is() -> None:
    array = jax.ShapeDtypeStruct((2**32, 2), jnp.float32)
    assert memplan_bytes(lambda x, y: x + y, (array, array), device="v100") == 2 * 2**35
    with pytest.raises(AssertionError, match="does not fit"):
        assert_peak_below(lambda x, y: x + y, (array, array), "100%", device="v100")


@pytest.mark.gpu_aot
def test_a_real_step_is_held(pytester: pytest.Pytester) -> None:
    test = "\n    def test_step(memplan_snapshot):\n        memplan_snapshot(step, ARGS)\n"
    pytester.makepyfile(test_net=STEP + test)
    run(pytester, "--memplan-update").assert_outcomes(passed=1)
    run(pytester).assert_outcomes(passed=1)
    pytester.makepyfile(test_net=STEP.replace("SIZE = 128", "\n    SIZE = 192") + test)
    result = run(pytester)
    result.assert_outcomes(failed=1)
    larger = "*larger *3 x float32[[]4096,128 -> 192[]] *test_net.py:9 *"
    result.stdout.fnmatch_lines(["*its compiled bytes rose by *", larger])


def test_without_the_extra_a_test_fails_and_names_it(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object, **__: object) -> object:
        raise NotImplementedError("topology not implemented for cuda")

    platform.described_devices.cache_clear()
    monkeypatch.setattr(topologies, "get_topology_desc", missing)
    pytester.makepyfile(
        STEP
        + "\n    import memplan.testing\n    def test_it(): memplan.testing.memplan_bytes(step, ARGS)"
    )
    result = run(pytester)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E *UnknownDeviceError*a100*pip install 'memplan[[]gpu-aot[]]'*"])
    result.stdout.no_fnmatch_line("*described_devices*")
