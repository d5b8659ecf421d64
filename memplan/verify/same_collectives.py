"""The verifier of shaped collectives: is a module the plain one, with collectives in other phases that move the same?

It shares no code with those who write them. It follows every array of both modules on every device: collectives, and
instructions that only move elements, say which elements of which expressions a device holds, and over which devices
each is summed (see `Spreads`). All else is an expression of such arrays. The expressions of the shaped module must be
expressions of the plain one, and what both return must be the same; how sums are ordered, and in which phases they are
made, is not.

A sum over devices that is only added up in a loop, from zeros, counts as one behind the loop: the devices that sum
together run the loop equally often, or the plain module would wait forever. Floats may be rounded where that was asked
for: once before the last phase of a sum, and once behind it.
"""

from collections import Counter
from collections.abc import Mapping

from memplan.verify.computation_meaning import ComputationMeaning, Meanings, ModuleMeaning, acts
from memplan.verify.dataflow import require
from memplan.verify.moves import COLLECTIVES
from memplan.xla.module import Computation, Module

_WIRES = {None: "", "bfloat16": "bf16", "float16": "f16"}


def judge_shaped(plain: Module, shaped: Module, partitions: int, wire: str | None = None) -> None:
    """Accept a module whose collectives were put in other phases.

    Args:
      partitions: on how many devices the modules run.
      wire: the type to which float32 sums may be rounded between hosts: "bfloat16" or "float16".

    Raises:
      NotThePlainModuleError: it computes something else; names the instruction.
    """
    require(wire in _WIRES, f"rounds to {wire}, which is not known")
    same = (plain.name, plain.options) == (shaped.name, shaped.options)
    require(same, "has other options, such as donated arguments")
    _compare_channels(plain, shaped)
    meanings = Meanings(partitions)
    first, second = ModuleMeaning(meanings, plain, ""), ModuleMeaning(meanings, shaped, _WIRES[wire])
    _compare_expressions(first.expressions, second.expressions, second.names)
    _compare(first.entry, second.entry)
    require(not first.barriers - second.barriers, "lacks a barrier")
    _compare_unused(plain, shaped)


def _compare(plain: ComputationMeaning, shaped: ComputationMeaning) -> None:
    require(plain.arguments == shaped.arguments, "has other arguments")
    require(plain.effects == shaped.effects, "has other effects, or in another order")
    if plain.outputs != shaped.outputs:
        names = shaped.body.root.operands or (shaped.body.root.name,)
        pairs = zip(plain.outputs, shaped.outputs, strict=False)
        wrong = [number for number, (one, other) in enumerate(pairs) if one != other]
        name = names[wrong[0]] if wrong and wrong[0] < len(names) else shaped.body.root.name
        require(False, f"returns another value in {name}")


def _compare_expressions(plain: Counter[int], shaped: Counter[int], names: Mapping[int, str]) -> None:
    for expression, count in shaped.items():
        known = plain[expression]
        what = "what the plain module does not" if not known else "what the plain module computes less often"
        require(count <= known, f"computes by {names[expression]} {what}")


def _compare_channels(plain: Module, shaped: Module) -> None:
    """Every collective has a channel that no other has, unless the plain module has it so."""
    known, found = _channels(plain), _channels(shaped)
    for channel, names in found.items():
        shared = len(names) > max(1, len(known.get(channel, ())))
        require(not shared, f"gives {' and '.join(names)} the same channel")


def _channels(module: Module) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for body in module.values():
        for op in body.ops.values():
            if op.channel is not None:
                found.setdefault(op.channel, []).append(op.name)
    return found


def _compare_unused(plain: Module, shaped: Module) -> None:
    """No collective sends what nobody reads."""
    known = {name for body in plain.values() for name in _unused(body)}
    for body in shaped.values():
        for name in _unused(body):
            require(name in known, f"sends in {name} what nobody reads")


def _unused(body: Computation) -> list[str]:
    """The collectives that neither the results nor an effect depends on."""
    used = {body.root.name}
    for op in reversed(list(body.ops.values())):
        if op.name in used or acts(op):
            used.update((op.name, *op.operands))
    return [op.name for op in body.ops.values() if op.opcode in COLLECTIVES and op.name not in used]
