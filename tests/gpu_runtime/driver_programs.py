"""Programs that call the stand-in driver itself, without jax: they start in a tenth of a second."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_size_t, c_uint64, c_void_p

MIB = 1 << 20
OUT_OF_MEMORY, NOT_SUPPORTED, NON_BLOCKING = 2, 801, 1


def cuda() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def device_block(size: int) -> c_uint64:
    address = c_uint64()
    assert cuda().cuMemAlloc_v2(byref(address), c_size_t(size)) == 0
    return address


def pinned_block(size: int) -> c_void_p:
    address = c_void_p()
    assert cuda().cuMemHostAlloc(byref(address), c_size_t(size), 0) == 0
    return address


def stream() -> c_void_p:
    handle = c_void_p()
    assert cuda().cuStreamCreate(byref(handle), NON_BLOCKING) == 0
    return handle


def words_at(address: c_uint64, count: int) -> list[int]:
    """What the device holds, copied to the host."""
    host = (ctypes.c_uint32 * count)()
    assert cuda().cuMemcpyDtoH_v2(host, address, c_size_t(4 * count)) == 0
    return list(host)


def limits() -> dict[str, list[int]]:
    """Allocations of 100 MiB until one fails: the status of each, of device memory and of pinned memory."""
    statuses: dict[str, list[int]] = {"device": [], "pinned": []}
    for name, call in (("device", cuda().cuMemAlloc_v2), ("pinned", cuda().cuMemHostAlloc)):
        while not statuses[name] or statuses[name][-1] == 0:
            statuses[name].append(call(byref(c_uint64()), c_size_t(100 * MIB), 0))
    return statuses


def fresh_and_leaked() -> list[int]:
    """The first words of fresh memory; one block of each kind is freed, one of the device is not."""
    device, kept, pinned = device_block(MIB), device_block(4096), pinned_block(MIB)
    first = [
        *words_at(device, 2),
        *words_at(kept, 1),
        ctypes.c_uint32.from_address(pinned.value or 0).value,
    ]
    cuda().cuMemFree_v2(device)
    cuda().cuMemFreeHost(pinned)
    return first


def touch_freed() -> None:
    block, target = device_block(MIB), device_block(MIB)
    cuda().cuMemFree_v2(block)
    cuda().cuMemcpyDtoDAsync_v2(target, block, c_size_t(MIB), None)
    cuda().cuCtxSynchronize()


def independent_work(rounds: int) -> None:
    """Fills on one stream, copies from pinned memory on another; nothing orders the two."""
    fills, copies = stream(), stream()
    device, pinned = device_block(MIB), pinned_block(MIB)
    for _ in range(rounds):
        cuda().cuMemcpyHtoDAsync_v2(device, pinned, c_size_t(MIB // 2), copies)
        cuda().cuMemsetD8Async(c_uint64(device.value + MIB // 2), 1, c_size_t(MIB // 2), fills)
    cuda().cuCtxSynchronize()


def ordered_by_events(rounds: int) -> list[int]:
    """A word goes up and down between two streams, each time one more: right only if every wait is kept."""
    producer, back = stream(), stream()
    device, pinned, event = device_block(4096), pinned_block(4096), c_void_p()
    cuda().cuEventCreate(byref(event), 0)
    words = []
    for i in range(rounds):
        cuda().cuMemsetD32Async(device, i, c_size_t(1024), producer)
        cuda().cuEventRecord(event, producer)
        cuda().cuStreamWaitEvent(back, event, 0)
        cuda().cuMemcpyDtoHAsync_v2(pinned, device, c_size_t(4096), back)
        cuda().cuEventRecord(event, back)
        cuda().cuStreamWaitEvent(producer, event, 0)
        cuda().cuStreamSynchronize(back)
        words.append(ctypes.c_uint32.from_address(pinned.value or 0).value)
    return words


# An instruction of the tensor cores, which nobody interprets.
UNKNOWN_INSTRUCTION = """
.version 8.0
.target sm_80
.address_size 64
.visible .entry product(.param .u64 product_param_0)
{
  .reg .f32 %f<9>;
  .reg .b32 %r<9>;
  mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%f1,%f2,%f3,%f4}, {%r1,%r2,%r3,%r4}, {%r5,%r6}, {%f5,%f6,%f7,%f8};
  ret;
}
"""
# Lanes leave a loop one after another, meet for a shuffle, and part again.
DIVERGING = """
.version 8.0
.target sm_70
.address_size 64
.visible .entry diverging(.param .u64 diverging_param_0)
{
  .reg .pred %p<3>;
  .reg .b32 %r<9>;
  .reg .b64 %rd<4>;
  ld.param.u64 %rd1, [diverging_param_0];
  mov.u32 %r1, %tid.x;
  mov.u32 %r2, 0;
$L__TOP:                            // lane n goes round n + 1 times
  add.s32 %r2, %r2, 1;
  setp.le.s32 %p1, %r2, %r1;
  @%p1 bra $L__TOP;
  shfl.sync.bfly.b32 %r3, %r2, 16, 31, -1;  // all lanes are together again
  setp.gt.s32 %p2, %r1, 7;
  @%p2 bra $L__END;
  add.s32 %r3, %r3, 1000;
$L__END:
  mul.wide.u32 %rd2, %r1, 4;
  add.s64 %rd3, %rd1, %rd2;
  st.global.u32 [%rd3], %r3;
  ret;
}
"""
# A function that returns a struct, as XLA's fusions with many results have them: its parts go by one or four at a time.
RETURNING = """
.version 8.0
.target sm_70
.address_size 64
.func (.param .align 16 .b8 made[24]) parts(.param .b32 parts_param_0)
{
  .reg .b32 %r<6>;
  .reg .b64 %rd<2>;
  ld.param.u32 %r1, [parts_param_0];
  add.s32 %r2, %r1, 1;
  add.s32 %r3, %r1, 2;
  add.s32 %r4, %r1, 3;
  cvt.u64.u32 %rd1, %r1;
  st.param.v4.b32 [made], {%r1, %r2, %r3, %r4};
  st.param.b64 [made+16], %rd1;
  ret;
}
.visible .entry returning(.param .u64 returning_param_0)
{
  .reg .b32 %r<9>;
  .reg .b64 %rd<6>;
  ld.param.u64 %rd1, [returning_param_0];
  mov.u32 %r1, %tid.x;
  mul.lo.s32 %r2, %r1, 10;
  {
  .param .b32 given;
  st.param.b32 [given], %r2;
  .param .align 16 .b8 got[24];
  call.uni (got), parts, (given);
  ld.param.b32 %r3, [got+4];
  ld.param.v2.b32 {%r4, %r5}, [got+8];
  ld.param.b64 %rd2, [got+16];
  }
  add.s32 %r6, %r3, %r4;
  add.s32 %r6, %r6, %r5;
  cvt.u32.u64 %r7, %rd2;
  add.s32 %r6, %r6, %r7;
  mul.wide.u32 %rd3, %r1, 4;
  add.s64 %rd4, %rd1, %rd3;
  st.global.u32 [%rd4], %r6;
  ret;
}
"""
# Lane n writes 32 words of shared memory; a matrix and its transpose are read, and the latter is written back as it is.
MATRICES = """
.version 8.0
.target sm_90
.address_size 64
.visible .entry matrices(.param .u64 matrices_param_0)
{
  .reg .b32 %r<12>;
  .reg .b64 %rd<4>;
  .shared .align 16 .b8 held[256];
  ld.param.u64 %rd1, [matrices_param_0];
  mov.u32 %r1, %tid.x;
  mov.u32 %r2, held;
  mad.lo.s32 %r3, %r1, 131074, 65536;  // numbers 2n and 2n + 1
  shl.b32 %r4, %r1, 2;
  add.s32 %r5, %r2, %r4;
  st.shared.b32 [%r5], %r3;
  and.b32 %r6, %r1, 15;
  shl.b32 %r6, %r6, 4;
  add.s32 %r6, %r2, %r6;               // row n % 16: of two matrices, the second of which is not written
  bar.sync 0;
  ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r7}, [%r6];
  ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%r8}, [%r6];
  stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%r6+128], {%r8};
  bar.sync 0;
  ld.shared.b32 %r9, [%r5+128];        // as it was
  mul.wide.u32 %rd2, %r1, 12;
  add.s64 %rd3, %rd1, %rd2;
  st.global.u32 [%rd3], %r7;
  st.global.u32 [%rd3+4], %r8;
  st.global.u32 [%rd3+8], %r9;
  ret;
}
"""


def launch(ptx: str, name: str, words: int) -> list[int]:
    """The status of a launch of one warp, then the words that it wrote."""
    module, function = c_void_p(), c_void_p()
    block = device_block(4 * words)
    assert cuda().cuModuleLoadData(byref(module), ptx.encode()) == 0
    assert cuda().cuModuleGetFunction(byref(function), module, name.encode()) == 0
    arguments = (c_void_p * 1)(ctypes.addressof(block))
    status = cuda().cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, None, arguments, None)
    cuda().cuCtxSynchronize()
    return [status, *words_at(block, words)]


def launch_unknown() -> list[int]:
    return launch(UNKNOWN_INSTRUCTION, "product", 1)


def launch_diverging() -> list[int]:
    return launch(DIVERGING, "diverging", 32)


def launch_matrices() -> list[int]:
    return launch(MATRICES, "matrices", 96)


def launch_returning() -> list[int]:
    return launch(RETURNING, "returning", 32)


def launch_graph() -> list[int]:
    """Words of a graph of three fills, the middle one of which comes last by its dependencies; launched twice."""

    class Fill(ctypes.Structure):
        _fields_ = (
            ("destination", c_uint64), ("pitch", c_size_t), ("value", ctypes.c_uint32), ("bytes", ctypes.c_uint32),
            ("width", c_size_t), ("height", c_size_t), ("context", c_void_p),
        )  # fmt: skip

    graph, executable, block = c_void_p(), c_void_p(), device_block(4096)
    cuda().cuGraphCreate(byref(graph), 0)
    nodes = [c_void_p() for _ in range(3)]
    for i, after in enumerate(([], [], [0, 1])):
        before = (c_void_p * 2)(*(nodes[k].value for k in after))
        fill = Fill(block.value, 0, 10 + i, 4, 1024, 1, None)
        assert (
            cuda().cuGraphAddMemsetNode(
                byref(nodes[i]), graph, before, c_size_t(len(after)), byref(fill), None
            )
            == 0
        )
    assert cuda().cuGraphInstantiateWithFlags(byref(executable), graph, c_uint64(0)) == 0
    words = []
    for _ in range(2):
        cuda().cuMemsetD32Async(block, 0, c_size_t(1024), None)
        cuda().cuGraphLaunch(executable, None)
        words += words_at(block, 1)
    cuda().cuGraphExecDestroy(executable)
    cuda().cuGraphDestroy(graph)
    return words
