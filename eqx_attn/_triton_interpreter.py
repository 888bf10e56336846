"""Runs a `triton.jit` kernel on the CPU, under Triton's interpreter.

Triton decides at import (`TRITON_INTERPRET=1`) whether `triton.jit` compiles or interprets, for the whole process. Here
both live in one process: a kernel's functions are rewritten for the interpreter on *copies* of their globals, and the
language module is patched only while a kernel runs. `LANGUAGE_LOCK` keeps a compilation in another thread from
seeing the patched language.
"""

import contextlib
import dataclasses
import itertools
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ._triton_arguments import Argument, Descriptor, Pointer, Scalar

LANGUAGE_LOCK = threading.Lock()

# Arrays sit between margins, so that an access beyond an end is seen instead of being luck: a read finds NaN (or -1),
# a write is an error.
_MARGIN = 4096
_ALIGNMENT = 64
_INPUT_MARGIN = 0xFF
_OUTPUT_MARGIN = 0xA5


class _Interpreted:
    """The interpreted twin of one jitted function; rewritten when first called.

    The name `fn` is Triton's: its reductions call `combine_fn.fn`.
    """

    def __init__(self, jitted: Any) -> None:
        self._jitted = jitted
        self._fn: Callable | None = None

    @property
    def fn(self) -> Callable:
        if self._fn is None:
            self._fn = _rewrite(self._jitted.fn)
        return self._fn

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        # Some are methods of `tl.tensor`.
        return self if instance is None else types.MethodType(self, instance)


_twins: dict[int, _Interpreted] = {}


def _twin(jitted: Any) -> _Interpreted:
    # By identity: a jitted function's own hash reads its source and that of everything it calls. The twin keeps the
    # function alive, so its id is not used again.
    return _twins.setdefault(id(jitted), _Interpreted(jitted))


def _rewrite(function: Callable) -> Callable:
    """The function with the interpreter's AST changes, over copied globals in which jitted functions are twins."""
    from triton.runtime.interpreter import FunctionRewriter
    from triton.runtime.jit import JITFunction

    names = dict(function.__globals__)
    if function.__closure__:
        names |= {
            name: cell.cell_contents
            for name, cell in zip(function.__code__.co_freevars, function.__closure__, strict=True)
        }
    names = {name: _twin(value) if isinstance(value, JITFunction) else value for name, value in names.items()}
    copy = types.FunctionType(function.__code__.replace(co_freevars=()), names, function.__name__)
    copy.__qualname__, copy.__module__ = function.__qualname__, function.__module__
    return FunctionRewriter(copy).rewrite_ast()


@contextlib.contextmanager
def _interpreted_language() -> Iterator[None]:
    """Turns `triton.language` into the interpreter's, and back."""
    import triton.language as tl
    from triton.runtime import interpreter
    from triton.runtime.jit import JITFunction

    scope = interpreter._LangPatchScope()
    try:
        # Checks of every integer sum and product for overflow would take a third of the time.
        builder = interpreter.interpreter_builder
        scope.set_attr(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False))
        for owner in (tl, tl.core, tl.math, tl.standard, tl.random, tl.core.tensor):
            for name, value in list(vars(owner).items()):
                if isinstance(value, JITFunction):
                    scope.set_attr(owner, name, _twin(value))
        language = interpreter._patch_lang(types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        try:
            yield
        finally:
            language.restore()
    finally:
        scope.restore()


def _guarded(shape: Sequence[int], dtype: np.dtype, margin: int) -> tuple[np.ndarray, np.ndarray]:
    """An array between margins of the given byte, and the memory that it lies in."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    memory = np.full(size + 2 * _MARGIN + _ALIGNMENT, margin, np.uint8)
    start = _MARGIN + (-(memory.ctypes.data + _MARGIN)) % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape), memory


def _poisoned_output(shape: Sequence[int], dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """An output in which an element that the kernel does not write shows: NaN, or an integer's extreme."""
    array, memory = _guarded(shape, dtype, _OUTPUT_MARGIN)
    if dtype.kind == "b":
        array[...] = True
    elif dtype.kind in "iu":
        array[...] = np.iinfo(dtype).min if dtype.kind == "i" else np.iinfo(dtype).max
    else:
        array[...] = np.nan
    return array, memory


def _margins_intact(array: np.ndarray, memory: np.ndarray) -> bool:
    start = array.ctypes.data - memory.ctypes.data
    before, after = memory[:start], memory[start + array.nbytes :]
    return bool((before == _OUTPUT_MARGIN).all() and (after == _OUTPUT_MARGIN).all())


def _scalar(value: int | float, triton_dtype: str) -> Any:
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    scalar_type: Any = tl.str_to_ty(triton_dtype, None)
    numpy_dtype = {"i32": np.int32, "i64": np.int64, "fp32": np.float32}[triton_dtype]
    return tl.tensor(TensorHandle(np.array([value], numpy_dtype), scalar_type), scalar_type)


def _pointer(array: np.ndarray, triton_dtype: str) -> Any:
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    element_type: Any = tl.str_to_ty(triton_dtype, None)
    pointer_type = tl.core.pointer_type(element_type)
    return tl.tensor(TensorHandle(np.array([array.ctypes.data], np.uint64), pointer_type), pointer_type)


def _descriptor(array: np.ndarray, argument: Descriptor) -> Any:
    import triton.language as tl
    from triton.runtime.interpreter import interpreter_semantic

    return interpreter_semantic.make_tensor_descriptor(
        base=_pointer(array, argument.dtype),
        shape=[_scalar(extent, "i32") for extent in argument.shape],
        strides=[*(_scalar(stride, "i64") for stride in argument.strides[:-1]), tl.constexpr(1)],
        block_shape=[tl.constexpr(extent) for extent in argument.block_shape],
        padding_option="zero",
    )


def _bind(parameters: dict[str, Argument], buffers: Sequence[np.ndarray]) -> dict[str, Any]:
    remaining = iter(buffers)
    bound = {}
    for name, argument in parameters.items():
        match argument:
            case Scalar():
                bound[name] = _scalar(argument.value, argument.type)
            case Pointer():
                bound[name] = _pointer(next(remaining), argument.dtype)
            case Descriptor():
                bound[name] = _descriptor(next(remaining), argument)
    return bound


def run_interpreted(
    kernel: Any,
    parameters: dict[str, Argument],
    arrays: Sequence[np.ndarray],
    outputs: Sequence[tuple[tuple[int, ...], np.dtype]],
    grid: tuple[int, ...],
    constants: dict[str, Any],
    *,
    updated: int = 0,
) -> tuple[np.ndarray, ...]:
    """Runs every program of the grid, one after the other.

    **Arguments:**

    - `kernel`: a `triton.jit` function.
    - `parameters`: its run-time parameters by name. Those that are not scalars refer to the arrays and then the
        outputs, in order.
    - `arrays`: they are copied.
    - `outputs`: shape and dtype of each output.
    - `grid`: up to three numbers of programs.
    - `constants`: the `tl.constexpr` parameters by name.
    - `updated`: how many of the arrays, the last ones, the kernel also writes.

    **Returns:** the outputs, then the updated arrays. Elements of outputs that no program wrote are NaN (an integer's
    extreme value, for integers).

    **Raises:** `RuntimeError` if a program wrote beyond an output's ends.
    """
    from triton.runtime.interpreter import interpreter_builder

    copies = []
    for number, array in enumerate(arrays):
        is_updated = number >= len(arrays) - updated
        copy, memory = _guarded(array.shape, array.dtype, _OUTPUT_MARGIN if is_updated else _INPUT_MARGIN)
        copy[...] = array
        copies.append((copy, memory))
    new = [_poisoned_output(shape, dtype) for shape, dtype in outputs]
    results = [*new, *copies[len(arrays) - updated :]]

    with LANGUAGE_LOCK, np.errstate(all="ignore"), _interpreted_language():
        bound = _bind(parameters, [array for array, _ in (*copies, *new)])
        extents = (*grid, 1, 1)[:3]
        interpreter_builder.set_grid_dim(*extents)
        program = _twin(kernel)
        for index in itertools.product(*map(range, extents)):
            interpreter_builder.set_grid_idx(*index)
            program(**bound, **constants)

    for number, (array, memory) in enumerate(results):
        if not _margins_intact(array, memory):
            raise RuntimeError(
                f"triton kernel {kernel.__name__}: wrote outside output {number} of shape {array.shape}."
            )
    return tuple(array for array, _ in results)
