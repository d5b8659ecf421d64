"""The operations by which calibration measures what kernels of each class achieve.

An operation is compiled several times in a row, each run of it waiting for the one before, so that
the host's launch hardly counts. What its kernels compute is read from the compiled module, as plans
read it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from memplan.program import compat
from memplan.xla.kernel_cost import KernelCost, kernel_cost
from memplan.xla.module import BLOCKS, Module, with_blocks
from memplan.xla.replay import is_free

Run = Callable[[], Any]
"""Starts a run and returns its result; the caller waits for that."""
Direction = Literal["forward", "input gradient", "filter gradient"]

_NARROW = 256  # a shorter side of a product stays as it is: it is what makes the product narrow
_MULTIPLIER = 2654435761  # 2**32 over the golden ratio: multiples are spread evenly (Knuth)
_IMAGES = 8  # of the smallest batch: a multiple of 16 bytes in every type


@dataclass(frozen=True)
class Product:
    """A matrix product; its long sides grow with `scale`."""

    dtype: str
    rows: int
    columns: int
    contracted: int

    def _sides(self, scale: int) -> tuple[int, ...]:
        sides = self.rows, self.columns, self.contracted
        return tuple(scale * side if side >= _NARROW else side for side in sides)

    def flops(self, scale: int) -> float:
        return 2.0 * math.prod(self._sides(scale))

    def operands(self, scale: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        rows, columns, contracted = self._sides(scale)
        return _structs(self.dtype, (rows, contracted), (contracted, columns))

    def __call__(self, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return lhs @ rhs

    def __str__(self) -> str:
        return f"product {self.rows}x{self.columns}x{self.contracted} {self.dtype}"


@dataclass(frozen=True)
class Convolution:
    """A convolution with padding SAME, channels last, or one of its gradients.

    The batch grows with the square of `scale`.
    """

    dtype: str
    direction: Direction
    sides: tuple[int, ...]
    channels: int
    features: int
    window: int = 3

    def _shapes(self, scale: int) -> tuple[tuple[int, ...], ...]:
        """Of the image, the kernel and the result."""
        pixels = _IMAGES * scale**2, *self.sides
        kernel = *(self.window,) * len(self.sides), self.channels, self.features
        return (*pixels, self.channels), kernel, (*pixels, self.features)

    def flops(self, scale: int) -> float:
        _, kernel, result = self._shapes(scale)
        return 2.0 * math.prod(result) * math.prod(kernel[:-1])

    def operands(self, scale: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        image, kernel, result = self._shapes(scale)
        if self.direction == "forward":
            return _structs(self.dtype, image, kernel)
        other = kernel if self.direction == "input gradient" else image
        return _structs(self.dtype, result, other)

    def __call__(self, first: jax.Array, second: jax.Array) -> jax.Array:
        if self.direction == "forward":
            return self._convolved(first, second)
        if self.direction == "input gradient":
            image = (*first.shape[:-1], self.channels)
            function, shape = partial(self._convolved, kernel=second), image
        else:
            kernel = *(self.window,) * len(self.sides), self.channels, self.features
            function, shape = partial(self._convolved, second), kernel
        [struct] = _structs(self.dtype, shape)
        [gradient] = jax.linear_transpose(function, struct)(first)
        return gradient

    def _convolved(self, image: jax.Array, kernel: jax.Array) -> jax.Array:
        letters = "DHW"[-len(self.sides) :]
        numbers = f"N{letters}C", f"{letters}IO", f"N{letters}C"
        strides = (1,) * len(self.sides)
        return lax.conv_general_dilated(image, kernel, strides, "SAME", dimension_numbers=numbers)

    def __str__(self) -> str:
        sides = "x".join(map(str, self.sides))
        return f"{self.direction} {sides} {self.channels}->{self.features} {self.dtype}"


Operation = Product | Convolution

_PRODUCTS = (
    *(Product(dtype, 512, 512, 512) for dtype in ("float32", "bfloat16", "float16")),
    Product("float32", 2048, 64, 512),
    Product("bfloat16", 2048, 64, 512),
    Product("float32", 1024, 256, 256),
    Product("bfloat16", 512, 1024, 128),
    Product("float32", 256, 256, 2048),
    Product("bfloat16", 256, 256, 2048),
    Product("float16", 4096, 64, 64),
)
_LAYERS = (  # type, sides, channels, features; not aligned are those of 3 and 33 channels
    ("float32", (14, 14), 256, 256),
    ("bfloat16", (14, 14), 256, 256),
    ("bfloat16", (28, 28), 64, 64),
    ("float32", (28, 28), 32, 32),
    ("float32", (28, 28), 33, 33),
    ("bfloat16", (28, 28), 3, 64),
    ("float32", (8, 8, 8), 64, 64),
    ("bfloat16", (16, 16, 16), 16, 16),
)
_DIRECTIONS: tuple[Direction, ...] = ("forward", "input gradient", "filter gradient")

OPERATIONS: tuple[Operation, ...] = (
    *_PRODUCTS,
    *(
        Convolution(dtype, direction, sides, channels, features)
        for dtype, sides, channels, features in _LAYERS
        for direction in _DIRECTIONS
    ),
)
"""Of every class, with long and with narrow sides, in the types that training uses."""


def nbytes(operation: Operation, scale: int) -> int:
    """Bytes of the operands and of the result."""
    operands = operation.operands(scale)
    structs = *operands, jax.eval_shape(operation, *operands)
    return sum(struct.size * struct.dtype.itemsize for struct in structs)


def repeated(operation: Operation, scale: int, count: int) -> tuple[Run, tuple[KernelCost, ...]]:
    """Compile an operation `count` times in a row; the run, and all its kernels."""
    first, *others = jax.jit(partial(_numbers, operation.operands(scale)))(jnp.uint32(1))

    run, compiled = in_place(in_a_row(operation, count), first, *others)
    return run, kernels(Module.read(compat.module_of(compiled)))


def in_a_row(operation: Operation, count: int) -> Callable[..., jax.Array]:
    """The function that runs an operation `count` times, each after the one before."""

    def function(first: jax.Array, *others: jax.Array) -> jax.Array:
        for _ in range(count):
            first = _after(first, operation(first, *others))
        return first

    return function


def chain(nbytes: int, count: int) -> Run:
    """Read and write an array of these bytes in place, in `count` kernels that do not fuse."""

    def function(x: jax.Array) -> jax.Array:
        for _ in range(count):
            x = lax.optimization_barrier(x + 1)
        return x

    return in_place(function, jnp.ones(nbytes // 4, jnp.float32))[0]


def in_place(function: Callable[..., jax.Array], first: jax.Array, *others: jax.Array) -> Any:
    """Apply a function to its own result, in place: new memory would cost system time.

    Returns the run and what was compiled.
    """
    buffer = [first]
    compiled = jax.jit(function, donate_argnums=0).lower(first, *others).compile()

    def run() -> jax.Array:
        buffer[0] = compiled(buffer[0], *others)
        return buffer[0]

    return run, compiled


def kernels(module: Module) -> tuple[KernelCost, ...]:
    """The costs of the kernels of a compiled function; a loop's count once."""
    return tuple(
        kernel_cost(module, body, op)
        for body in with_blocks(module, module.entry)
        for op in body.ops.values()
        if op.opcode not in BLOCKS and not is_free(op)
    )


def _after(first: jax.Array, result: jax.Array) -> jax.Array:
    """`first` with one element that depends on the result, so that what reads it runs after."""
    result = lax.optimization_barrier(result)  # else XLA computes no more than the element
    element = lax.slice(result, (0,) * result.ndim, (1,) * result.ndim)
    # tanh, as it would grow from run to run
    element = jnp.tanh(element).reshape((1,) * first.ndim).astype(first.dtype)
    return lax.dynamic_update_slice(first, element, (0,) * first.ndim)


def _numbers(structs: Sequence[jax.ShapeDtypeStruct], seed: jax.Array) -> list[jax.Array]:
    """Arrays of numbers between -1 and 1, without order.

    Zeros and ones draw less power, so some chips would clock higher. `jax.random` takes longer than
    the operations on a CPU.
    """
    arrays = []
    for struct in structs:
        bits = (lax.iota(jnp.uint32, struct.size) + seed) * jnp.uint32(_MULTIPLIER)
        numbers = lax.bitcast_convert_type(bits, jnp.int32).astype(jnp.float32) * 2.0**-31
        arrays.append(numbers.astype(struct.dtype).reshape(struct.shape))
    return arrays


def _structs(dtype: str, *shapes: tuple[int, ...]) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape in shapes)
