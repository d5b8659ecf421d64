"""The verifier of plans: is a planned module the plain one, recomputed, offloaded and reordered?

It shares no code with planners and writers. It names every value of the planned module by its
computation, looking through clones, copies and fusions; each must be a value of the plain module,
and the outputs must be the same. Buffers are not part of these names: after a donated argument, an
updated array or a loop's carry was overwritten in place, its old value may be read only where the
plain module reads it, too.
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
    _compare(entry_dataflow(plain, expressions), entry_dataflow(planned, expressions))


def _compare(plain: Dataflow, planned: Dataflow) -> None:
    """Compare a computation of both modules, then its loops one by one."""
    for name, results in planned.results.items():
        is_plain = plain.computed.issuperset(results)
        require(is_plain, f"computes by {name} what the plain module does not")
    require(plain.outputs == planned.outputs, "returns other values")
    require(plain.effects == planned.effects, "has other effects, or in another order")
    missing = Counter(plain.single) - Counter(planned.single)
    require(not missing, "lacks what must run")
    repeated = Counter(planned.single) - Counter(plain.single)
    require(not repeated, "runs again what updates in place or has effects")
    _compare_overwrites(plain, planned)
    for plain_loop, planned_loop in zip(plain.loops, planned.loops, strict=True):
        _compare(plain_loop, planned_loop)


def _compare_overwrites(plain: Dataflow, planned: Dataflow) -> None:
    uses = plain.reads_of_overwritten()
    for meaning, readers in planned.reads_of_overwritten().items():
        allowed = readers <= uses.get(meaning, set())
        require(allowed, "reads in a fusion what that one overwrites")
    late_reads = plain.late_reads()
    for overwrite, readers in planned.late_reads().items():
        allowed = late_reads.get(overwrite, {})
        wrong = [name for expression, name in readers.items() if expression not in allowed]
        require(not wrong, f"reads in {', '.join(wrong)} what was overwritten before")
