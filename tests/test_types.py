"""What a type checker knows of a planned step: pyright, in strict mode, reads a user's script."""

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import jax, memplan
State = dict[str, jax.Array]
def step(state: State, batch: jax.Array) -> tuple[State, float]: ...
@memplan.jit(budget="1GiB", donate_argnums=0)
def decorated(state: State, batch: jax.Array) -> tuple[State, float]: ...
class Model:
    @memplan.jit(budget="1GiB")
    def method(self, x: int) -> str: ...
planned = decorated.plan({}, jax.ShapeDtypeStruct((3,), "float32"))
reveal_type(memplan.jit(step, budget="1GiB"))
reveal_type(decorated)
reveal_type(decorated({}, jax.random.key(0)))
reveal_type(planned.report)
reveal_type(decorated.report)
reveal_type(planned.plan)
reveal_type(planned.compile())
reveal_type(planned.compile()({}, 1))
reveal_type(Model().method(3))
reveal_type(memplan.equinox.filter_jit(step, donate="all"))
reveal_type(memplan.equinox.filter_jit(budget=1)(step))
reveal_type(memplan.nnx.jit(step).plan({}))
reveal_type(memplan.nnx.jit(graph=False)(step))
decorated({}, "no array")
"""
PARAMETERS = "(state: dict[str, Array], batch: Array)"
RESULT = "tuple[dict[str, Array], float]"
JIT = f"[{PARAMETERS}, {RESULT}]"


def test_a_planned_step_keeps_its_signature(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    root = Path(__file__).parents[1]
    (tmp_path / "pyrightconfig.json").write_text(
        f'{{"typeCheckingMode": "strict", "extraPaths": ["{root.as_posix()}"]}}'
    )
    words = ["-m", "pyright", "--pythonpath", sys.executable, "-p", str(tmp_path)]
    output = subprocess.run([sys.executable, *words], capture_output=True, text=True).stdout
    types = re.findall(r'information: Type of ".*" is "(.*)"', output)
    assert types == [
        f"PlannedJit{JIT}",
        f"PlannedJit{JIT}",
        RESULT,
        "Report",
        "Report",
        "Plan | None",
        f"Compiled[{RESULT}]",
        RESULT,
        "str",
        f"FilterJit{JIT}",
        f"FilterJit{JIT}",
        f"Planned[{RESULT}]",
        f"NnxJit{JIT}",
    ], output
    [error] = re.findall("error: .*", output)
    assert 'parameter "batch" of type "Array"' in error
