"""The parser, on what XLA wrote (jax 0.10.2, V100) of a product, a sine copied to the host and back, and a product."""

from __future__ import annotations

from memplan.program.hlo import Buffer, Schedule, read_schedule

HLO = """\
ENTRY %main.2 (x.1: f32[64,64], w.1: f32[64,64]) -> f32[] {
  %w.1 = f32[64,64]{1,0} parameter(1), metadata={op_name="w"}
  %x.1 = f32[64,64]{1,0} parameter(0), metadata={op_name="x"}
  %custom-call.5 = (f32[64,64]{1,0}, s8[4194304]{0}) custom-call(%x.1, %w.1), custom_call_target="__cublas$lt$matmul", \
metadata={op_name="jit(f)/memplan.0.0/dot_general" stack_frame_id=10}
  %get-tuple-element.3 = f32[64,64]{1,0} get-tuple-element(%custom-call.5), index=0, \
metadata={op_name="jit(f)/memplan.0.0/dot_general" stack_frame_id=10}
  %wrapped_sine = f32[64,64]{1,0} fusion(%get-tuple-element.3), kind=kLoop, calls=%wrapped_sine_computation, \
metadata={op_name="jit(f)/memplan.0.1/sin" stack_frame_id=5}
  %copy-start.2 = (f32[64,64]{1,0:S(5)}, f32[64,64]{1,0}, u32[]) copy-start(%wrapped_sine)
  %copy-done.2 = f32[64,64]{1,0:S(5)} copy-done(%copy-start.2)
  %optimization_barrier.10.0 = (f32[64,64]{1,0}, f32[64,64]{1,0:S(5)}) tuple(%wrapped_sine, %copy-done.2), \
metadata={op_name="jit(f)/optimization_barrier" stack_frame_id=9}
  %copy-start.1.0 = (f32[64,64]{1,0}, f32[64,64]{1,0:S(5)}, u32[]) copy-start(%optimization_barrier.14.0)
  %copy-done.1.0 = f32[64,64]{1,0} copy-done(%copy-start.1.0)
  %custom-call.6 = (f32[64,64]{1,0}, s8[4194304]{0}) custom-call(%wrapped_sine, %w.1), \
metadata={op_name="jit(f)/memplan.1.2/dot_general" stack_frame_id=11}
  ROOT %input_reduce_fusion = f32[] fusion(%custom-call.6), kind=kInput, \
metadata={op_name="jit(f)/memplan.2.4/reduce_sum" stack_frame_id=3}
}
"""

LIVE_RANGES = """\
HloLiveRange (max 10):
  InstructionSequence:
    0:w.1
    1:x.1
    2:custom-call.5
    3:get-tuple-element.3
    4:wrapped_sine
    5:copy-start.2
    6:copy-done.2
    7:copy-start.1.0
    8:custom-call.6
    9:input_reduce_fusion
  BufferLiveRange:
    w.1{}:0-10
    x.1{}:0-10
    custom-call.5{}:2-3
    custom-call.5{0}:2-4
    custom-call.5{1}:2-2
    wrapped_sine{}:4-8
    copy-start.2{0}:5-8
    copy-start.1.0{0}:7-9
    custom-call.6{0}:8-9
    custom-call.6{1}:8-8
    input_reduce_fusion{}:9-10
  Live ranges at 8 (peak):
    custom-call.6{1}: 4194304 bytes (cumulative: 4194304 bytes)
    copy-start.1.0{0}: 16384 bytes (cumulative: 4210688 bytes)
  Stack trace breakdown for peak usage: 4 292 624 bytes
"""

ASSIGNMENT = """\
BufferAssignment:
allocation 0: size 16384, parameter 1, shape |f32[64,64]| at ShapeIndex {}:
 value: <8 w.1 @0> (size=16384,offset=0): f32[64,64]{1,0}
allocation 1: size 16384, parameter 0, shape |f32[64,64]| at ShapeIndex {}:
 value: <9 x.1 @0> (size=16384,offset=0): f32[64,64]{1,0}
allocation 2: size 4, thread-local:
 value: <2 reduce_sum.5.0 @0> (size=4,offset=0): f32[]
allocation 5: size 4, output shape is |f32[]|, maybe-live-out:
 value: <28 input_reduce_fusion @0> (size=4,offset=0): f32[]
allocation 6: size 4245016, preallocated-temp:
 value: <10 custom-call.5{} @0> (size=16,offset=0): (f32[64,64]{1,0}, s8[4194304]{0})
 value: <11 custom-call.5{0} @0> (size=16384,offset=4195328): f32[64,64]{1,0}
 value: <12 custom-call.5{1} @0> (size=4194304,offset=1024): s8[4194304]{0}
 value: <13 wrapped_sine @0> (size=16384,offset=4228096): f32[64,64]{1,0}
 value: <19 copy-start.1.0{0} @0> (size=16384,offset=4195328): f32[64,64]{1,0}
 value: <22 custom-call.6{0} @0> (size=16384,offset=4211712): f32[64,64]{1,0}
 value: <23 custom-call.6{1} @0> (size=4194304,offset=1024): s8[4194304]{0}
allocation 7: size 16384, color 5, preallocated-temp:
 value: <15 copy-start.2{0} @5> (size=16384,offset=0): f32[64,64]{1,0:S(5)}

Total bytes used: 4294188 (4.10MiB)

Used values:
<0 reduce_sum.3 @0>
 positions:
"""


def schedule() -> Schedule:
    return read_schedule(HLO, LIVE_RANGES, ASSIGNMENT)


def test_steps_in_order() -> None:
    steps = schedule().steps
    assert (steps[0], steps[2], steps[-1]) == ("w.1", "custom-call.5", "input_reduce_fusion")
    assert len(steps) == 10


def test_buffers_with_their_spans_and_places() -> None:
    found = {buffer.name: buffer for buffer in schedule().buffers}
    assert found["wrapped_sine{}"] == Buffer("wrapped_sine{}", 16384, 4, 8, True, False, 4228096, "f32[64,64]")
    assert found["custom-call.5{1}"] == Buffer("custom-call.5{1}", 4194304, 2, 2, True, False, 1024, "s8[4194304]")
    assert found["copy-start.2{0}"] == Buffer("copy-start.2{0}", 16384, 5, 8, True, True, shape="f32[64,64]")
    assert not found["x.1{}"].temporary
    assert not found["input_reduce_fusion{}"].temporary
    assert "reduce_sum.5.0{}" not in found  # it lives inside a kernel


def test_a_buffer_that_is_written_over_ends_before() -> None:
    over = ASSIGNMENT.replace("size=16384,offset=4228096", "size=16384,offset=4195328")
    buffers = read_schedule(HLO, LIVE_RANGES, over).buffers
    spans = {buffer.name: (buffer.start, buffer.end) for buffer in buffers if buffer.nbytes == 16384}
    assert spans["custom-call.5{0}"] == (2, 3)  # the sine is written over it at step 4
    assert spans["wrapped_sine{}"] == (4, 8)


def test_what_a_loop_hands_on_counts() -> None:
    handed = ASSIGNMENT.replace("<13 wrapped_sine @0>", "<13 wrapped_sine (phi) @0>")
    assert read_schedule(HLO, LIVE_RANGES, handed) == schedule()


def test_marks_of_the_rewriter() -> None:
    marks = schedule().marks
    assert marks["custom-call.5"] == (0, 0)
    assert marks["wrapped_sine"] == (0, 1)
    assert marks["input_reduce_fusion"] == (2, 4)  # the root as well
    assert "optimization_barrier.10.0" not in marks
    assert schedule().mark("custom-call.6{1}") == (1, 2)
    assert schedule().mark("copy-start.2{0}") is None


def test_live_bytes_leave_out_the_host_and_the_arguments() -> None:
    found = schedule()
    assert found.live_nbytes[0] == 0
    assert found.live_nbytes[4] == 2 * 16384
    assert found.live_nbytes[6] == 16384
    assert found.live_nbytes[8] == 4194304 + 3 * 16384
    assert found.host_live_nbytes == (0, 0, 0, 0, 0, 16384, 16384, 16384, 16384, 0)
    assert found.peak_step == 8
    assert [buffer.nbytes for buffer in found.alive(8)] == [4194304, 16384, 16384, 16384]


def test_unmarked_steps_belong_to_the_segment_before() -> None:
    found = schedule()
    assert found.segment_of_step == (0, 0, 0, 0, 0, 0, 0, 0, 1, 2)
    assert found.segment_peaks() == {0: 4194304 + 16384 + 16, 1: 4194304 + 3 * 16384, 2: 2 * 16384}


def test_a_program_without_temporaries() -> None:
    found = read_schedule("", "", "")
    assert found.steps == found.buffers == found.live_nbytes == ()
    assert found.peak_step == 0
    assert found.segment_peaks() == {}
