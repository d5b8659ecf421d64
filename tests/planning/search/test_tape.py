"""A problem on a tape: its values and slots, and the slots for recomputations."""

from hypothesis import given
from hypothesis import strategies as st

from memplan.planning.search.ledger import Ledger, reconcile
from memplan.planning.search.tape import record
from tests.planning.small import branching, calling, fetching, looping, updating
from tests.planning.steps import in_a_loop, training


def test_temporaries_are_values_and_kernels_are_slots_and_operations() -> None:
    tape = record(updating())
    assert (tape.order, [value.buffer for value in tape.values]) == ((0, 1, 2, 3), [1, 2])
    assert [value.first_slot for value in tape.values] == [0, 1]
    assert [slot.reads for slot in tape.slots] == [(), (0,), (1,), (0, 1)]
    once = [operation.seconds is None for operation in tape.operations]
    assert once == [False, False, True, True]  # outputs


def test_what_reads_an_argument_is_recomputed_before_its_update_alone() -> None:
    tape = record(updating())
    assert tape.may_recompute(0, 2) and not tape.may_recompute(0, 3)
    assert tape.may_recompute(1, 3)


def test_an_update_in_one_branch_is_none_of_another() -> None:
    tape = record(branching())
    assert tape.may_recompute(0, 2) and not tape.may_recompute(0, 3)
    assert tape.may_recompute(4, 6) and not tape.may_recompute(4, 7)


def test_in_another_order_the_slots_are_others() -> None:
    tape = record(updating(), (0, 1, 3, 2))
    assert [slot.reads for slot in tape.slots] == [(), (0,), (0, 1), (1,)]
    assert tape.may_recompute(0, 2) and tape.may_recompute(0, 3)


def test_what_is_made_outside_of_a_loop_is_recomputed_before_its_body() -> None:
    tape = record(looping())
    blocks = [slot.block for slot in tape.slots]
    assert blocks[:2] == [-1, -1] and blocks[2:5] == [5, 5, 5] and blocks[6] == -1
    assert tape.may_recompute(0, 1) and not tape.may_recompute(0, 3)


@given(st.integers(2, 8), st.integers(0, 99))
def test_a_body_recomputes_what_a_straight_line_does(layers: int, seed: int) -> None:
    problem = training(layers, seed)
    straight = record(problem)
    body = record(in_a_loop(problem, 3))
    for operation in range(len(straight.operations)):
        for slot in range(straight.count):
            assert body.may_recompute(operation + 1, slot + 1) == straight.may_recompute(
                operation, slot
            )


def test_what_a_call_makes_is_read_behind_it() -> None:
    assert [slot.reads for slot in record(calling()).slots] == [(), (0,), (), (0,), (1, 2)]


def test_what_a_pair_writes_is_whole_behind_its_end() -> None:
    assert [value.ready_slot for value in record(fetching()).values] == [2, 1]


@given(st.integers(2, 8), st.integers(0, 99), st.sets(st.integers(0, 20)))
def test_empty_slots_take_nothing_that_was_not_there(
    layers: int, seed: int, slots: set[int]
) -> None:
    problem = training(layers, seed)
    tape = reconcile(problem, record(problem))
    longer = tape.with_empty_slots({slot for slot in slots if slot < tape.count})
    load = iter(Ledger(tape).load.tolist())
    new_load = Ledger(longer).load.tolist()
    for slot, nbytes, floor_nbytes in zip(longer.slots, new_load, longer.floor_nbytes, strict=True):
        assert floor_nbytes == 0 if slot.operation is None else nbytes == next(load)
    operations = [slot.operation for slot in longer.slots if slot.operation is not None]
    assert operations == list(range(tape.count))
