"""What a Triton kernel can be passed: pointers, scalars, and TMA descriptors of an array's blocks."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

_TRITON_DTYPES = {
    "float64": "fp64",
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
    "int64": "i64",
    "int32": "i32",
    "int16": "i16",
    "int8": "i8",
    "uint64": "u64",
    "uint32": "u32",
    "uint16": "u16",
    "uint8": "u8",
    "bool": "i1",
}


@dataclasses.dataclass(frozen=True, eq=False)
class TensorDescriptor:
    """An array (or, among the outputs, its ShapeDtypeStruct) that a kernel reads or writes in blocks through TMA.

    **Arguments:**

    - `array`: its elements are row-major.
    - `block_shape`: the shape of one block.
    - `layout`: for a Gluon kernel the block's layout in shared memory, an `NVMMASharedLayout`.
    - `shape`, `strides`: how the kernel sees the array, in elements; by default its own. The last stride is 1, the
        others are multiples of 16 bytes.

    **Raises:** `ValueError` if ranks or strides are not as said.
    """

    array: Array | jax.ShapeDtypeStruct
    block_shape: tuple[int, ...]
    layout: Any = None
    shape: tuple[int, ...] | None = None
    strides: tuple[int, ...] | None = None

    def as_argument(self, what: str) -> "Descriptor":
        """All of it that is known when a call is traced."""
        shape = tuple(self.array.shape) if self.shape is None else tuple(self.shape)
        strides = _row_major(shape) if self.strides is None else tuple(self.strides)
        if not len(shape) == len(strides) == len(self.block_shape):
            raise ValueError(
                f"triton_call: {what} is a TensorDescriptor with shape {shape}, strides {strides} and block_shape "
                f"{tuple(self.block_shape)}; they must have the same rank."
            )
        itemsize = jnp.dtype(self.array.dtype).itemsize
        if strides[-1] != 1 or any(stride * itemsize % 16 for stride in strides[:-1]):
            raise ValueError(
                f"triton_call: {what} is a TensorDescriptor with strides {strides} of {itemsize}-byte elements; "
                "the last must be 1 and the others multiples of 16 bytes. Pad the last axis."
            )
        return Descriptor(triton_dtype(what, self.array.dtype), tuple(self.block_shape), self.layout, shape, strides)


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for extent in reversed(shape[1:]):
        strides.insert(0, strides[0] * extent)
    return tuple(strides)


@dataclasses.dataclass(frozen=True)
class Pointer:
    """The address of an array's first element."""

    dtype: str

    @property
    def type(self) -> str:
        """As in a kernel's signature."""
        return f"*{self.dtype}"

    @property
    def divisible_by_16(self) -> bool:
        """XLA aligns its buffers, to more than that."""
        return True


@dataclasses.dataclass(frozen=True)
class Scalar:
    """A number; its type is "i32", "i64" or "fp32"."""

    type: str
    value: int | float

    @property
    def divisible_by_16(self) -> bool:
        """Lets Triton widen the loads of rows whose stride this is."""
        return isinstance(self.value, int) and self.value % 16 == 0


@dataclasses.dataclass(frozen=True)
class Descriptor:
    """A `TensorDescriptor` without its array."""

    dtype: str
    block_shape: tuple[int, ...]
    layout: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def type(self) -> str:
        """As in a kernel's signature."""
        layout = "" if self.layout is None else f",{self.layout!r}"
        return f"tensordesc<{self.dtype}{list(self.block_shape)}{layout}>"

    @property
    def divisible_by_16(self) -> bool:
        """Not an integer, nor a pointer."""
        return False


type Argument = Pointer | Scalar | Descriptor


def triton_dtype(what: str, dtype: Any) -> str:
    """Triton's name of a dtype, such as "fp16". Raises `TypeError`, naming `what`, if it has none."""
    name = jnp.dtype(dtype).name
    if name not in _TRITON_DTYPES:
        raise TypeError(f"triton_call: {what} has dtype {name}, which Triton does not know.")
    return _TRITON_DTYPES[name]


def as_argument(what: str, value: Any) -> tuple[Argument, Any]:
    """What is known of an input or output when a call is traced, and its array (or shape and dtype) if it has one."""
    if isinstance(value, TensorDescriptor):
        return value.as_argument(what), value.array
    if isinstance(value, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        return Pointer(triton_dtype(what, value.dtype)), value
    if isinstance(value, float):
        return Scalar("fp32", value), None
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            f"triton_call: {what} must be an array, a TensorDescriptor, an int or a float, found "
            f"{type(value).__name__}; a flag is a tl.constexpr and belongs in `constants`."
        )
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"triton_call: {what} is {value}, which does not fit 64 bits.")
    return Scalar("i32" if -(2**31) <= value < 2**31 else "i64", value), None
