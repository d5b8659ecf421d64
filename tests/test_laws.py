"""Who may import whom. Read from the syntax tree: nothing is run, so a law holds on every machine.

A house maps module names to their source. Each law turns a house into a list of breaches; the laws are shown to bite on
small invented houses before they judge the real one.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

House = Mapping[str, str]
Law = Callable[["FloorPlan"], list[str]]

ROOT = Path(__file__).parents[1]

# Plain data of the planning wing, which everyone above may hold in their hands.
TYPES = (
    "memplan.planning.graph",
    "memplan.planning.loop",
    "memplan.planning.plan",
    "memplan.planning.devices",
    "memplan.planning.overheads",
    "memplan.planning.spec",
    "memplan.planning.topology",
)

# What a room may import of memplan; the longest matching name counts, and a module outside every room is a breach.
ROOMS: Mapping[str, tuple[str, ...]] = {
    "memplan.errors": (),
    "memplan.files": (),
    "memplan.report": ("memplan.report", "memplan.files"),
    "memplan.planning": ("memplan.planning", "memplan.files", "memplan.errors"),
    "memplan.program": ("memplan.program", "memplan.errors", *TYPES),
    "memplan.xla": (
        "memplan.xla",
        "memplan.planning.collectives",  # collectives in seconds
        "memplan.planning.cost",  # kernels in seconds
        "memplan.planning.precedence",
        "memplan.planning.problem",
        "memplan.planning.schedule",
        "memplan.program.arguments",
        "memplan.program.compat",
        "memplan.program.spmd",
        "memplan.errors",
        *TYPES,
    ),
    "memplan.verify.same_module": ("memplan.xla.module", "memplan.errors"),  # nothing of what plans and writes
    "memplan.verify": (
        "memplan.verify",
        "memplan.errors",
        "memplan.program.compat",
        "memplan.program.trace",
        "memplan.xla.network",
    ),
    "memplan.plan_cache": ("memplan.planning.plan", "memplan.files", "memplan.errors"),
    "memplan.inside": ("memplan.plan_cache", "memplan.planning", "memplan.verify.same_module", "memplan.xla"),
    "memplan.residuals": ("memplan.planning", "memplan.program", "memplan.errors"),
    "memplan.pipeline": (
        "memplan.inside",
        "memplan.parallel.agreement",  # one plan for all processes
        "memplan.residuals",
        "memplan.planning",
        "memplan.program",
        "memplan.verify",
        "memplan.xla",
        "memplan.errors",
    ),
    "memplan.timelines": ("memplan.inside", "memplan.planning", "memplan.report", "memplan.xla"),
    "memplan.summary": (
        "memplan.inside",
        "memplan.pipeline",
        "memplan.timelines",
        "memplan.planning",
        "memplan.report",
        "memplan.xla",
    ),
    "memplan.running": ("memplan.pipeline", "memplan.program", "memplan.verify", "memplan.errors"),
    "memplan.baselines": ("memplan.inside", "memplan.program", "memplan.xla"),
    "memplan.comparing": (
        "memplan.baselines",
        "memplan.inside",
        "memplan.pipeline",
        "memplan.summary",
        "memplan.planning.budget",
        "memplan.report",
    ),
    "memplan.curving": (
        "memplan.baselines",
        "memplan.pipeline",
        "memplan.summary",
        "memplan.planning.floor",
        "memplan.report",
        "memplan.errors",
    ),
    "memplan.sizing": (
        "memplan.pipeline",
        "memplan.summary",
        "memplan.planning",
        "memplan.report",
        "memplan.errors",
    ),
    "memplan.scaling": (
        "memplan.parallel",
        "memplan.pipeline",
        "memplan.summary",
        "memplan.planning.budget",
        "memplan.xla.traffic",
        "memplan.report",
        "memplan.errors",
        *TYPES,
    ),
    "memplan.parallel": ("memplan.parallel", "memplan.program", "memplan.planning", "memplan.xla", "memplan.errors"),
    "memplan.api": (
        "memplan.comparing",
        "memplan.curving",
        "memplan.pipeline",
        "memplan.running",
        "memplan.sizing",
        "memplan.summary",
        "memplan.report",
        "memplan.errors",
        "memplan.planning.budget",
        "memplan.planning.registry",
        "memplan.program.arguments",
        "memplan.program.compat",  # is another trace under way, and which
        "memplan.program.host_state",
        "memplan.xla.local",
        *TYPES,
    ),
    "memplan.factory": ("memplan.errors",),
    "memplan.calibrating": ("memplan.program", "memplan.report", "memplan.xla", "memplan.errors", *TYPES),
    "memplan.cli": (
        "memplan.cli",
        "memplan.api",
        "memplan.calibrating",
        "memplan.report",
        "memplan.scaling",
        "memplan.parallel",
        "memplan.errors",
        "memplan.factory",
        *TYPES,
    ),
    "memplan": ("memplan.api", "memplan.parallel", "memplan.report", "memplan.errors", *TYPES),
}
OPEN_ROOMS = {"memplan"}  # only the package itself, not whatever stands in it

PURE = ("memplan.planning", "memplan.report", "memplan.errors", "memplan.files")
JAX = ("jax", "jaxlib", "flax", "optax")
INTERNALS = ("jax._src", "jax.extend")
DOOR = "memplan.program.compat"
PLANNERS = "memplan.planning.planners"
# What decides or carries out a plan; whoever judges it stands apart from all of these, at any distance.
DECIDES = (PLANNERS, "memplan.planning.planner", "memplan.planning.evict", "memplan.planning.repair")
JUDGED = (*DECIDES, "memplan.planning.packing", "memplan.xla.write", "memplan.xla.buffers", "memplan.xla.sharing")

# Optional extras, which may be imported where they are used.
OPTIONAL_EXTRAS: tuple[str, ...] = ("matplotlib", "orbax", "perfetto")
# Modules that import by a name only known at run time: the user's `MODULE:FACTORY`, and the demo. The demo is an
# experiment of the repository and not part of the installed package; `memplan demo` looks for it when it is asked to,
# and says so where it is absent. A plain import of it would break every installation, and is a breach.
IMPORT_BY_NAME = ("memplan.factory",)
# The package loads its public names when they are asked for, from a table of homes written out in full: the planning
# half works without jax. The table's entries count as imports for every law above.
HOMES = {"memplan": "_HOMES"}


@dataclass(frozen=True)
class Import:
    """`target` as it stands in `module`; a module of the house where it is one, else what was written."""

    module: str
    target: str
    line: int
    inside: bool

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.target}"


class FloorPlan:
    """The floor plan of a house: its modules and every import in them, however deep."""

    def __init__(self, house: House, packages: frozenset[str] = frozenset()):
        self.trees = {name: ast.parse(source) for name, source in house.items()}
        self.packages = packages
        self.imports = [found for name, tree in self.trees.items() for found in self._of(name, tree, False)]
        self.imports += [found for name, tree in self.trees.items() for found in _homes(name, tree)]

    def reach(self, room: str) -> dict[str, str]:
        """Every module that the room's modules import, at any distance, and by which way."""
        way = {name: name for name in self.trees if within(name, room)}
        waiting = list(way)
        while waiting:
            module = waiting.pop()
            for found in self.imports:
                if found.module == module and found.target in self.trees and found.target not in way:
                    way[found.target] = f"{way[module]} -> {found.target}"
                    waiting.append(found.target)
        return way

    def _of(self, module: str, node: ast.AST, inside: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            for target in self._targets(module, child):
                yield Import(module, target, getattr(child, "lineno", 0), inside)
            function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from self._of(module, child, inside or function)

    def _targets(self, module: str, node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = self._absolute(module, node)
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                yield whole if whole in self.trees or base.split(".")[0] in JAX else base

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        up = node.level - (module in self.packages)
        parts = module.split(".")[: len(module.split(".")) - up]
        return ".".join([*parts, *([node.module] if node.module else [])])


def _homes(module: str, tree: ast.Module) -> Iterator[Import]:
    """Modules in the table of homes of a module that has one."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and [dotted(name) for name in node.targets] == [HOMES.get(module)]:
            homes = ast.literal_eval(node.value)
            yield from (Import(module, home, node.lineno, False) for home in dict.fromkeys(homes.values()))


def within(module: str, *rooms: str) -> bool:
    return any(module == room or module.startswith(f"{room}.") for room in rooms)


def dotted(node: ast.AST) -> str:
    """`a.b.c` of such an expression, else ''."""
    if isinstance(node, ast.Name):
        return node.id
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


def purity(plan: FloorPlan) -> list[str]:
    """Planning and report do without jax: they test in milliseconds and serve graphs from elsewhere."""
    return [str(found) for found in plan.imports if within(found.module, *PURE) and within(found.target, *JAX)]


def one_door(plan: FloorPlan) -> list[str]:
    """Only compat touches JAX's internals, by import or by attribute."""
    breaches = [str(found) for found in plan.imports if found.module != DOOR and within(found.target, *INTERNALS)]
    for module, tree in plan.trees.items():
        if module != DOOR:
            touched = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and dotted(node) in INTERNALS]
            breaches += [f"{module}:{node.lineno} reaches into {dotted(node)}" for node in touched]
    return breaches


def rooms(plan: FloorPlan) -> list[str]:
    """A room imports what its table entry lists and nothing else of memplan."""
    breaches = []
    for module in plan.trees:
        if within(module, "memplan") and _room(module) is None:
            breaches.append(f"{module} stands in no room: give it an entry in ROOMS")
    for found in plan.imports:
        room = _room(found.module)
        whole_package = found.target == "memplan" and within(found.module, "memplan.cli")
        if room and within(found.target, "memplan") and not within(found.target, *ROOMS[room]) and not whole_package:
            breaches.append(f"{found}, which {room} may not")
    return breaches


def _room(module: str) -> str | None:
    fitting = [room for room in ROOMS if module == room or (room not in OPEN_ROOMS and within(module, room))]
    return max(fitting, key=len, default=None)


def independent_judge(plan: FloorPlan) -> list[str]:
    """Verify reaches nothing that decides, replays or carries out a plan, not even through others."""
    return [way for module, way in plan.reach("memplan.verify").items() if within(module, *JUDGED)]


def obedient_writer(plan: FloorPlan) -> list[str]:
    """The writer obeys a plan and never chooses: nothing that does is in reach."""
    return [way for module, way in plan.reach("memplan.xla.write").items() if within(module, *DECIDES)]


def planners_apart(plan: FloorPlan) -> list[str]:
    """A planner knows the protocol and itself; only the registry knows them all."""
    breaches = []
    for found in plan.imports:
        own = _planner(found.module)
        other = _planner(found.target) if found.target in plan.trees else ""
        if own and own != "registry" and other and other not in (own, "protocol"):
            breaches.append(str(found))
    return breaches


def _planner(module: str) -> str:
    return module.removeprefix(f"{PLANNERS}.").split(".")[0] if module.startswith(f"{PLANNERS}.") else ""


def closed_house(plan: FloorPlan) -> list[str]:
    """memplan knows nothing of the repository around it, and models nothing of memplan."""
    outside = {"memplan": ("models", "experiments", "tests"), "models": ("memplan", "experiments", "tests")}
    return [str(found) for found in plan.imports if within(found.target, *outside.get(found.module.split(".")[0], ()))]


def imports_by_name(plan: FloorPlan) -> list[str]:
    """Importing by a computed name walks around every law above: only where listed, see IMPORT_BY_NAME and HOMES."""
    breaches = []
    for module, tree in plan.trees.items():
        if within(module, "memplan", "models") and module not in IMPORT_BY_NAME:
            calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
            called = [node for node in calls if dotted(node.func).split(".")[-1] in ("import_module", "__import__")]
            breaches += [f"{module}:{node.lineno} imports by name" for node in called if not _from_homes(module, node)]
    return breaches


def _from_homes(module: str, call: ast.Call) -> bool:
    """True for `importlib.import_module(_HOMES[name])`."""
    table = [dotted(argument.value) for argument in call.args if isinstance(argument, ast.Subscript)]
    return len(call.args) == 1 and not call.keywords and table == [HOMES.get(module)]


def imports_on_top(plan: FloorPlan) -> list[str]:
    """No import inside a function, except of an optional extra."""
    return [str(found) for found in plan.imports if found.inside and not within(found.target, *OPTIONAL_EXTRAS)]


def no_circles(plan: FloorPlan) -> list[str]:
    """No module reaches itself. That a module's packages are imported with it does not count."""
    edges: dict[str, list[str]] = {name: [] for name in plan.trees}
    for found in plan.imports:
        if found.target in plan.trees:
            edges[found.module].append(found.target)
    state: dict[str, bool] = {}  # False while its imports are followed, True when done
    breaches: list[str] = []

    def follow(module: str, way: tuple[str, ...]) -> None:
        state[module] = False
        for target in edges[module]:
            if state.get(target) is False:
                breaches.append(" -> ".join((*way[way.index(target) :], target)))
            elif target not in state:
                follow(target, (*way, target))
        state[module] = True

    for module in plan.trees:
        if module not in state:
            follow(module, (module,))
    return breaches


LAWS: tuple[Law, ...] = (
    purity,
    one_door,
    rooms,
    independent_judge,
    obedient_writer,
    planners_apart,
    closed_house,
    imports_by_name,
    imports_on_top,
    no_circles,
)

# Each an otherwise lawful house and the fragment that its breach must name.
BREACHES: list[tuple[Law, House, str]] = [
    (purity, {"memplan.planning.cost": "import jax"}, "memplan.planning.cost:1 imports jax"),
    (purity, {"memplan.report.model": "from jax import numpy as jnp"}, "jax.numpy"),
    (purity, {"memplan.planning.planners.greedy": "def plan():\n    import jaxlib.xla_client"}, "greedy:2"),
    (one_door, {"memplan.program.trace": "import jax.extend.core as jex"}, "jax.extend.core"),
    (one_door, {"memplan.program.trace": "from jax import extend"}, "jax.extend"),
    (one_door, {"models.unet": "from jax._src.core import Tracer"}, "jax._src.core"),
    (one_door, {"memplan.program.trace": "import jax\nx = jax.extend.core.Var"}, "trace:2 reaches into jax.extend"),
    (rooms, {"memplan.helpers": ""}, "stands in no room"),
    (rooms, {"memplan.report.text": "from memplan.errors import MemplanError"}, "memplan.report may not"),
    (
        rooms,
        {"memplan.program.extract": "from memplan.planning import cost", "memplan.planning.cost": ""},
        "planning.cost",
    ),
    (rooms, {"memplan.xla.write": "from memplan.planning.planners.greedy import plan"}, "planners.greedy"),
    (rooms, {"memplan.pipeline": "from memplan import api", "memplan.api": ""}, "memplan.api"),
    (rooms, {"memplan.api": "import memplan"}, "imports memplan, which"),
    (
        independent_judge,
        {"memplan.verify.same_module": "from memplan.planning import packing", "memplan.planning.packing": ""},
        "->",
    ),
    (
        independent_judge,
        {
            "memplan.verify.same_module": "from memplan.planning.graph import Graph",
            "memplan.planning.graph": "from .packing import Packing",
            "memplan.planning.packing": "",
        },
        "memplan.verify.same_module -> memplan.planning.graph -> memplan.planning.packing",
    ),
    (
        obedient_writer,
        {
            "memplan.xla.write": "from memplan.planning.plan import Plan",
            "memplan.planning.plan": "from memplan.planning.planners import greedy",
            "memplan.planning.planners.greedy": "",
        },
        "memplan.planning.plan -> memplan.planning.planners.greedy",
    ),
    (planners_apart, {f"{PLANNERS}.tabu": "from .greedy import plan", f"{PLANNERS}.greedy": ""}, "planners.greedy"),
    (planners_apart, {f"{PLANNERS}.tabu": f"import {PLANNERS}.registry", f"{PLANNERS}.registry": ""}, "registry"),
    (closed_house, {"memplan.cli": "from experiments.segmentation import demo"}, "experiments.segmentation"),
    (closed_house, {"models.unet": "import memplan"}, "imports memplan"),
    (imports_by_name, {"memplan.api": "import importlib\nimportlib.import_module('models.unet')"}, "api:2"),
    (imports_by_name, {"models.unet": "__import__('memplan')"}, "unet:1"),
    (imports_by_name, {"memplan": "import importlib\nimportlib.import_module(name)"}, "memplan:2"),
    (imports_by_name, {"memplan.api": "import importlib\nimportlib.import_module(_HOMES[name])"}, "api:2"),
    (rooms, {"memplan": "_HOMES = {'plan': 'memplan.pipeline'}"}, "memplan:1 imports memplan.pipeline"),
    (imports_on_top, {"memplan.api": "def plan():\n    import json"}, "api:2 imports json"),
    (imports_on_top, {"models.unet": "class Unet:\n    def __call__(self):\n        from math import pi"}, "unet:3"),
    (
        no_circles,
        {"models.a": "import models.b", "models.b": "from models import c", "models.c": "from . import a"},
        "->",
    ),
]

LAWFUL: House = {
    "memplan": "from memplan.api import jit\n_HOMES = {'jit': 'memplan.api'}\nimportlib.import_module(_HOMES[name])",
    "memplan.api": "from memplan import pipeline\nfrom memplan.report.model import Report",
    "memplan.cli": "import memplan\nfrom memplan import api, factory",
    "memplan.factory": "import importlib\nimportlib.import_module('experiments.demo')",
    "memplan.pipeline": f"from memplan.xla import write\nfrom {PLANNERS}.registry import named",
    "memplan.planning.devices": "import json",
    f"{PLANNERS}.greedy": "from .protocol import Planner",
    f"{PLANNERS}.protocol": "import numpy as np",
    f"{PLANNERS}.registry": "from . import greedy, protocol",
    "memplan.program.compat": "import jax\nfrom jax._src import core\nimport jax.extend.core",
    "memplan.xla.write": "import jax\nfrom memplan.program import compat",
    "memplan.report.model": "import rich",
    "memplan.verify.program": "import jax\nfrom memplan.program import compat",
    "models.unet": "import jax\nimport flax.linen as nn",
}


@functools.cache
def real_house() -> FloorPlan:
    paths = [path for top in ("memplan", "models", "experiments") for path in sorted((ROOT / top).rglob("*.py"))]
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths}
    packages = {name.removesuffix(".__init__") for name in names.values() if name.endswith(".__init__")}
    house = {name.removesuffix(".__init__"): path.read_text(encoding="utf-8") for path, name in names.items()}
    return FloorPlan(house, frozenset(packages))


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_the_house_keeps(law: Law) -> None:
    assert not law(real_house()), law.__doc__


@pytest.mark.parametrize(
    ("law", "house", "named"), BREACHES, ids=[f"{law.__name__}-{named}" for law, _, named in BREACHES]
)
def test_a_breach_is_found_and_named(law: Law, house: House, named: str) -> None:
    breaches = law(FloorPlan(house))
    assert len(breaches) == 1
    assert named in breaches[0]


def test_every_law_can_be_broken() -> None:
    assert {law for law, _, _ in BREACHES} == set(LAWS)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_a_lawful_house_is_left_alone(law: Law) -> None:
    assert not law(FloorPlan(LAWFUL))


def test_the_real_house_is_read_whole() -> None:
    plan = real_house()
    assert {"memplan", "memplan.planning", "memplan.program.compat", "memplan.report.model", "models"} <= set(
        plan.trees
    )
    assert any(found.module == DOOR and within(found.target, "jax._src") for found in plan.imports)
    assert "memplan.planning" in plan.packages
