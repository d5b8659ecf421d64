"""The verifier of shaped collectives: does a module compute the same with collectives in phases?

It shares no code with the writers of such modules. Both modules are read in order, once, and every
array gets a *meaning*: a number or a tuple that is equal for equal values on all devices. This page
says what a meaning is and why equal meanings suffice; `spreads` and `pieces` hold the arithmetic.

**What is represented.** All `n` devices run the same module. An *expression* is an instruction with
the meanings of its operands. On device `d` it has a value of its own, an array `x[d]`; `x` is then
called a *source*. A *spread array* says for every device and every element which source, which
position in it and which multiset of devices `O` (the *owners*) the element has: it is the sum of
`x[e][position]` over `e` in `O`. A source itself has `O = {d}` on device `d`; after an all-reduce
over a group `G` every member has `O = G`. Zeros have the source `ZERO`.

**The rules.** Instructions that only move elements, or add across devices, make spread arrays
(table `_RULES` in `moves`):

    reshape, bitcast, transpose, slice     the elements in another order, or fewer
    concatenate, pad with +0               more elements
    dynamic-slice                          with starts that follow from the device's number
                                           (`partition_numbers`)
    all-gather, all-to-all                 elements of the members of a group
    constant, broadcast of +0              zeros
    all-reduce, reduce-scatter (adding)    the union of the members' owners, element by element, if
                                           all terms have the same source and position
    add, reduce over dimension 0           the same on one device, unless all terms are sources

Every other instruction is an expression, and its results are sources: its opcode, shapes and
statement (`Instruction.statement`), the structure of the computations that it calls, the meanings
of its operands and of the instructions that it waits for. So is an instruction above whose elements
do not follow, whose groups are uneven or of replicas, which waits for others, or whose arrays are
not in the device's own memory. Effects (infeed, random numbers, custom calls that say so) are
numbered in order.

A loop is an expression of its condition, its body and its start. Its body may add a sum over
devices to a carry that starts from zeros and that nothing else reads or writes. That counts as one
sum over devices behind the loop: `sum_t sum_d x[t, d] = sum_d sum_t x[t, d]`. Devices that sum
together run the loop equally often, or the plain module would wait forever.

If a wire type is named, a float32 array may be rounded to it once before it is sent, summed in
float32, and rounded once behind the sum (`WireStage`). Bits of rounded elements may be sent as
integers. A sum that has been rounded may not be summed again.

**What is compared.** The options of the modules; the shapes of arguments, the effects in order and
the results of the entry; that every expression of the shaped module is computed at least as often
by the plain one; that barriers are kept; that no two collectives share a channel and no result of a
collective is lost, unless it is so in the plain module.

**What follows.** By induction over the instructions: equal meanings are equal values on every
device, if additions may be reordered. So an accepted module returns what the plain module returns
if its sums are added in another order, and, where a wire type is named, rounded twice.

**What does not follow.** Equal bits of sums of floats. Anything about buffers, memory and schedule:
the scheduled module is judged by `same_module`. That groups of collectives never wait for each
other: all devices run the same collectives in the same order. That XLA compiles what the module
says, and that instructions with equal statements do the same. The judge may also refuse a module
that is right, if digits cannot count out the order of its elements (`pieces`).
"""

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
    plain_meaning = ModuleMeaning(meanings, plain, "")
    shaped_meaning = ModuleMeaning(meanings, shaped, _WIRES[wire])
    _compare_expressions(plain_meaning, shaped_meaning)
    _compare_entries(plain_meaning.entry, shaped_meaning.entry)
    require(not plain_meaning.barriers - shaped_meaning.barriers, "lacks a barrier")
    _compare_unused(plain, shaped)


def _compare_entries(plain: ComputationMeaning, shaped: ComputationMeaning) -> None:
    require(plain.arguments == shaped.arguments, "has other arguments")
    require(plain.effects == shaped.effects, "has other effects, or in another order")
    if plain.outputs != shaped.outputs:
        root = shaped.body.root
        names = root.operands or (root.name,)
        pairs = enumerate(zip(plain.outputs, shaped.outputs, strict=False))
        different = [number for number, (before, after) in pairs if before != after]
        is_named = different and different[0] < len(names)
        name = names[different[0]] if is_named else root.name
        require(False, f"returns another value in {name}")


def _compare_expressions(plain: ModuleMeaning, shaped: ModuleMeaning) -> None:
    for expression, count in shaped.expressions.items():
        allowed = plain.expressions[expression]
        lack = "computes less often" if allowed else "does not"
        name = shaped.names[expression]
        require(count <= allowed, f"computes by {name} what the plain module {lack}")


def _compare_channels(plain: Module, shaped: Module) -> None:
    """Every collective has a channel that no other has, unless the plain module has it so."""
    plain_channels = _channels(plain)
    for channel, names in _channels(shaped).items():
        allowed = max(1, len(plain_channels.get(channel, ())))
        require(len(names) <= allowed, f"gives {' and '.join(names)} the same channel")


def _channels(module: Module) -> Mapping[int, list[str]]:
    """Channel -> the instructions that have it."""
    names: dict[int, list[str]] = {}
    for body in module.values():
        for op in body.ops.values():
            if op.channel is not None:
                names.setdefault(op.channel, []).append(op.name)
    return names


def _compare_unused(plain: Module, shaped: Module) -> None:
    """No collective sends what nobody reads."""
    allowed = {name for body in plain.values() for name in _unused(body)}
    for body in shaped.values():
        for name in _unused(body):
            require(name in allowed, f"sends in {name} what nobody reads")


def _unused(body: Computation) -> list[str]:
    """The collectives that neither the results nor an effect depends on."""
    used = {body.root.name}
    for op in reversed(list(body.ops.values())):
        if op.name in used or acts(op):
            used.update((op.name, *op.operands))
    collectives = [op.name for op in body.ops.values() if op.opcode in COLLECTIVES]
    return [name for name in collectives if name not in used]
