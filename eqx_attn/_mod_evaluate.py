"""Evaluates a `Program` on blocks of scores in plain JAX, and sums the gradients of what it captures."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from ._codegen import Literal
from ._operands import Operands

_OPERATIONS: dict[str, Callable[..., Array]] = dict(
    add=jnp.add,
    sub=jnp.subtract,
    mul=jnp.multiply,
    div=jnp.divide,
    int_div=jnp.floor_divide,
    trunc_div=lambda x, y: lax.div(*jnp.broadcast_arrays(x, y)),
    rem=jnp.remainder,
    trunc_rem=lambda x, y: lax.rem(*jnp.broadcast_arrays(x, y)),
    floor_divide=jnp.floor_divide,
    remainder=jnp.remainder,
    shift_left=jnp.left_shift,
    shift_right=jnp.right_shift,
    xor=jnp.bitwise_xor,
    lt=jnp.less,
    le=jnp.less_equal,
    gt=jnp.greater,
    ge=jnp.greater_equal,
    eq=jnp.equal,
    ne=jnp.not_equal,
    neg=jnp.negative,
    abs=jnp.abs,
    ceil=jnp.ceil,
    cos=jnp.cos,
    erf=lax.erf,
    exp=jnp.exp,
    exp2=jnp.exp2,
    floor=jnp.floor,
    log=jnp.log,
    log2=jnp.log2,
    max=jnp.maximum,
    min=jnp.minimum,
    rsqrt=lax.rsqrt,
    select=jnp.where,
    sigmoid=jax.nn.sigmoid,
    sin=jnp.sin,
    sqrt=jnp.sqrt,
    tanh=jnp.tanh,
)
_OPERATIONS |= {"and": jnp.bitwise_and, "or": jnp.bitwise_or, "not": jnp.invert}


class Evaluation:
    """The values of a program for one block of scores.

    `arguments` are, by kind, those that are needed, arrays of one rank that broadcast with one another; the first axis is that of
    examples. `arrays` are the captured ones, `[entries, *shape]`: as many examples after one another as there are fewer entries
    share one.
    """

    def __init__(
        self,
        program: Any,
        arguments: Mapping[str, Array],
        arrays: Sequence[Array],
        batch: int,
        deterministic: bool = False,
    ):
        self._program, self._arrays, self._batch, self._deterministic = program, arrays, batch, deterministic
        self._rank = max(x.ndim for x in arguments.values())
        self._values: dict[int, Any] = {
            number: arguments[kind] for number, kind in enumerate(program.kinds) if kind in arguments
        }

    def __call__(self, operand: Any) -> Any:
        """The array of one operand, which broadcasts against the scores."""
        if isinstance(operand, Literal):
            return np.asarray(operand.value, jnp.dtype(operand.dtype))
        if operand not in self._values:
            step = self._program.step(operand)
            if step.op == "load":
                result = self._arrays[step.capture].at[self.places(operand)].get(mode="promise_in_bounds")
            elif step.op == "cast":
                result = self(step.operands[0]).astype(step.dtype)
            else:
                result = _OPERATIONS[step.op](*map(self, step.operands))
            self._values[operand] = result
        return self._values[operand]

    def places(self, load: int) -> tuple[Any, ...]:
        """Where in a captured array the elements of a load lie: an index per axis, that of entries first."""
        step = self._program.step(load)
        entries = self._arrays[step.capture].shape[0]
        entry = jnp.arange(self._batch, dtype=jnp.int32) // (self._batch // entries)
        shape = (self._batch if entries > 1 else 1, *(1,) * (self._rank - 1))
        indices = [self(x) for x in step.operands]
        return (
            entry[: shape[0]].reshape(shape),
            *(x.reshape((1,) * self._rank) if x.ndim == 0 else x for x in indices),
        )

    def scattered(self, totals: Sequence[Array | None], gradient: Array) -> list[Array | None]:
        """`totals`, of which there is one for each captured array that is differentiated, and what one block adds to them.

        `gradient` is that of the block's values.
        """
        totals = list(totals)
        for load, slope in self._program.load_slopes:
            number = self._program.step(load).capture
            total = totals[number]
            if total is None:
                continue
            part = jnp.where(gradient == 0, 0, gradient * self(slope).astype(gradient.dtype))
            totals[number] = self.added(total, load, part)
        return totals

    def added(self, total: Array, load: int, part: Array) -> Array:
        """`total`, of the shape of a captured array, and what a block adds at the elements of a load.

        What shares an element is summed up first, where that is seen from shapes.
        """
        places = self.places(load)
        shape = jnp.broadcast_shapes(*(x.shape for x in places))
        part = jnp.sum(part, [axis for axis, size in enumerate(shape) if size == 1], keepdims=True)
        if self._deterministic and part.size > 1:
            return total + _sorted_sums(places, part, total.shape)
        return total.at[places].add(part, mode="promise_in_bounds")


def _sorted_sums(places: Sequence[Array], values: Array, shape: Sequence[int]) -> Array:
    """Values summed up at places of an array, in an order that is always the same; a GPU's scatter has none.

    They are sorted by place, and summed from place to place by a scan that starts anew at each.
    """
    flat = jnp.ravel_multi_index(tuple(jnp.broadcast_arrays(*places)), tuple(shape), mode="clip")
    flat, values = jnp.broadcast_to(flat, values.shape).reshape(-1), values.reshape(-1)
    flat, values = lax.sort((flat, values), num_keys=1, is_stable=True)
    starts = jnp.concatenate([jnp.ones(1, bool), flat[1:] != flat[:-1]])
    _, sums = lax.associative_scan(lambda x, y: (x[0] | y[0], jnp.where(y[0], y[1], x[1] + y[1])), (starts, values))
    ends = jnp.concatenate([starts[1:], jnp.ones(1, bool)])
    size = math.prod(shape)
    found = jnp.zeros(size, values.dtype).at[jnp.where(ends, flat, size)].set(sums, mode="drop")
    return found.reshape(shape)


def captured_totals(operands: Operands, rows: Mapping[int, Array], scattered: Mapping[int, Array]) -> list[Array]:
    """The gradients of a score function's arrays that are asked for, in float32, from what a kernel has summed up.

    `rows` are sums over keys, `[batch, q_heads, q_seq]`, by the number of the load that they belong to; `scattered` whole
    gradients, by the number of the array.
    """
    program, arrays = operands.score_mod, operands.score_arrays
    assert operands.batch_index is not None and operands.head_index is not None and operands.q_index is not None
    arguments = dict(
        batch=operands.batch_index[:, None, None], q_head=operands.head_index[:, None], q_index=operands.q_index
    )
    arguments = {kind: x.reshape((1,) * (3 - x.ndim) + x.shape) for kind, x in arguments.items()}
    evaluation = Evaluation(program, arguments, arrays, operands.batch_index.size)
    totals = [scattered.get(i, jnp.zeros(x.shape, jnp.float32)) for i, x in enumerate(arrays)]
    for load, parts in rows.items():
        number = program.step(load).capture
        totals[number] = evaluation.added(totals[number], load, parts)
    return [x for x, wanted in zip(totals, operands.mod_gradients, strict=True) if wanted]
