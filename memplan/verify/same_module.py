"""The verifier of plans: is a planned module the plain one, with clones, copies to the host and another order?

It shares no code with planners and writers. It names every value of the planned module by its computation, looking
through clones, copies and fusions; each must be a value of the plain module, and the outputs must be the same. Buffers
are not part of these names: after a donated argument, an updated array or a loop's carry was overwritten in place, its
old value may be read only where the plain module reads it there, too.
"""

from collections import Counter

from memplan.verify.dataflow import Dataflow, entry_dataflow, require
from memplan.verify.expressions import Expressions
from memplan.xla.module import Module


def judge(plain: Module, planned: Module) -> None:
    """Accept a planned module.

    Raises:
      NotThePlainModuleError: it computes something else; names the instruction.
    """
    expressions = Expressions()
    require(plain.aliases == planned.aliases, "donates other arguments")
    _compare(*(entry_dataflow(module, expressions) for module in (plain, planned)))


def _compare(first: Dataflow, second: Dataflow) -> None:
    """Compare a computation of the plain module with one of the planned module, then their loops one by one."""
    for name, made in second.made.items():
        require(first.computed.issuperset(made), f"computes by {name} what the plain module does not")
    require(first.outputs == second.outputs, "returns other values")
    require(first.effects == second.effects, "has other effects, or in another order")
    missing = Counter(first.single) - Counter(second.single)
    require(not missing, "lacks what must run")
    more = Counter(second.single) - Counter(first.single)
    require(not more, "runs again what updates in place or has effects")
    _compare_overwrites(first, second)
    for one, other in zip(first.loops, second.loops, strict=True):
        _compare(one, other)


def _compare_overwrites(first: Dataflow, second: Dataflow) -> None:
    within = first.reads_of_overwritten()
    for meaning, readers in second.reads_of_overwritten().items():
        require(readers <= within.get(meaning, set()), "reads in a fusion what that one overwrites")
    allowed = first.late_reads()
    for overwriting, readers in second.late_reads().items():
        known = allowed.get(overwriting, {})
        wrong = {expression: name for expression, name in readers.items() if expression not in known}
        require(not wrong, f"reads in {', '.join(wrong.values())} what was overwritten before")
