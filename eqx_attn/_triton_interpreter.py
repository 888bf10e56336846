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


def _pointer(array: np.ndarray, triton_dtype: str) -> Any:
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    pointer_type = tl.core.pointer_type(tl.str_to_ty(triton_dtype, None))
    return tl.tensor(TensorHandle(np.array([array.ctypes.data], np.uint64), pointer_type), pointer_type)


def _scalar(value: int | float, triton_dtype: str) -> Any:
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    scalar_type = tl.str_to_ty(triton_dtype, None)
    numpy_dtype = {"i32": np.int32, "i64": np.int64, "fp32": np.float32}[triton_dtype]
    return tl.tensor(TensorHandle(np.array([value], numpy_dtype), scalar_type), scalar_type)


def run_interpreted(
    kernel: Any,
    arguments: Sequence[tuple[str, Any]],
    arrays: Sequence[np.ndarray],
    outputs: Sequence[tuple[tuple[int, ...], np.dtype, str]],
    grid: tuple[int, ...],
    constants: dict[str, Any],
) -> tuple[np.ndarray, ...]:
    """Runs every program of the grid, one after the other.

    **Arguments:**

    - `kernel`: a `triton.jit` function.
    - `arguments`: per leading parameter its Triton type and the scalar's value; for a pointer ("*fp32") the
        index of its array.
    - `arrays`: the arrays that pointers refer to. They are copied.
    - `outputs`: shape, NumPy dtype and Triton dtype of each output; their pointers follow the arguments.
    - `grid`: up to three numbers of programs.
    - `constants`: the `tl.constexpr` parameters.

    **Returns:** the outputs. Elements that no program wrote are NaN (the most negative integer, for integers).

    **Raises:** `RuntimeError` if a program wrote beyond an output's ends.
    """
    from triton.runtime.interpreter import interpreter_builder

    inputs = []
    for array in arrays:
        copy, _ = _guarded(array.shape, array.dtype, _INPUT_MARGIN)
        copy[...] = array
        inputs.append(copy)
    results = [_poisoned_output(shape, dtype) for shape, dtype, _ in outputs]

    with LANGUAGE_LOCK, np.errstate(all="ignore"), _interpreted_language():
        positional = [
            _pointer(inputs[value], kind[1:]) if kind.startswith("*") else _scalar(value, kind)
            for kind, value in arguments
        ]
        positional += [_pointer(array, kind) for (array, _), (_, _, kind) in zip(results, outputs, strict=True)]
        names = [name for name in kernel.arg_names if name not in constants]
        named = dict(zip(names, positional, strict=True)) | constants
        extents = (*grid, 1, 1)[:3]
        interpreter_builder.set_grid_dim(*extents)
        program = _twin(kernel)
        for index in itertools.product(*map(range, extents)):
            interpreter_builder.set_grid_idx(*index)
            program(**named)

    for number, (array, memory) in enumerate(results):
        if not _margins_intact(array, memory):
            raise RuntimeError(
                f"triton kernel {kernel.__name__}: wrote outside output {number} of shape {array.shape}."
            )
    return tuple(array for array, _ in results)
