"""A kernel against the dense oracle: on which inputs, and what error its arithmetic explains."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike

from .. import Causal, Full, Mask, Segments, SlidingWindow
from .._call import Call, Route
from .._codegen import KernelSpec
from .._context import current_context
from .._masks import Alignment
from .._operands import Operands
from .._reference import reference_attention, visible_keys
from .._serve import operands_for, Options, prepare, sizes_of
from .._tuning import default_tiles
from .._vjp import attend

BATCH, Q_HEADS, KV_HEADS = 2, 4, 2
NAMES = ("out", "lse", "dq", "dk", "dv")


@dataclasses.dataclass(frozen=True)
class Shape:
    """Lengths, and how a band is aligned. Aligned to the bottom right, more queries than keys leave dead rows."""

    q_seq: int
    kv_seq: int
    alignment: Alignment = "top_left"


# Ragged both ways, and multiples of 16, which Triton compiles to other code.
SHAPES = (Shape(333, 461), Shape(461, 333, "bottom_right"), Shape(512, 512))
SMALL_SHAPES = (Shape(45, 77), Shape(77, 45, "bottom_right"))  # for an interpreter


def mask_of(spec: KernelSpec, shape: Shape) -> Mask:
    """A mask of the spec's kind. Ids are in no order, with padding on both sides and an id that only queries have."""
    window = shape.q_seq // 5
    bands = {
        "full": Full(),
        "causal": Causal(shape.alignment),
        "window": SlidingWindow(window, window // 3, shape.alignment),
    }
    mask = bands[str(spec.mask)]
    if not spec.segments:
        return mask
    random = np.random.default_rng(1)
    ids = [
        np.repeat(random.permutation(length // 16 + 1), 16)[:length] % count
        for length, count in ((shape.q_seq, 6), (shape.kv_seq, 5))
    ]
    # Id 0 is padding; 5 is an id that no key has.
    q_ids, kv_ids = (np.stack([row, np.roll(row, 7)]).astype(np.int32) for row in ids)
    return mask & Segments(jnp.asarray(q_ids), jnp.asarray(kv_ids))


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Arrays in the spec's layout and the call of its kernel. `seen` is the dense mask, for the oracle."""

    call: Call
    operands: Operands
    q: Array
    k: Array
    v: Array
    dout: Array
    dlse: Array
    seen: Array


def make_inputs(spec: KernelSpec, shape: Shape, dtype: str) -> Inputs:
    """Random arrays and cotangents. Raises AssertionError where the call would be served by another spec."""
    keys = jax.random.split(jax.random.key(0), 5)

    def random(key, seq, heads, dim):
        sizes = (BATCH, seq, heads, dim) if spec.layout == "bshd" else (BATCH, heads, seq, dim)
        return jax.random.normal(key, sizes, dtype)

    q = random(keys[0], shape.q_seq, Q_HEADS, spec.qk_dim)
    k = random(keys[1], shape.kv_seq, KV_HEADS, spec.qk_dim)
    v = random(keys[2], shape.kv_seq, KV_HEADS, spec.v_dim)
    dout = random(keys[3], shape.q_seq, Q_HEADS, spec.v_dim)
    layout = str(spec.layout)
    options = Options(mask_of(spec, shape), deterministic=True)
    request, plan = prepare(sizes_of(q, k, v, layout), layout, options)
    if request.spec(spec.target) != spec:
        raise AssertionError(f"the inputs made for {spec.name} belong to {request.spec(spec.target).name}")
    operands = operands_for(plan, spec.qk_dim**-0.5)
    seen = visible_keys(operands, shape.q_seq, shape.kv_seq)
    seen = jnp.broadcast_to(seen, (BATCH, 1, shape.q_seq, shape.kv_seq))
    dlse = jax.random.normal(keys[4], (BATCH, Q_HEADS, shape.q_seq), jnp.float32)
    # Nothing of a dead row's cotangent may get through.
    dlse = jnp.where(jnp.any(seen, axis=-1), dlse, jnp.nan)
    tiles = default_tiles(spec, dtype, shape.q_seq, shape.kv_seq)
    call = Call(str(spec.layout), Route(str(spec.target), spec, tiles), (), current_context())
    return Inputs(call, operands, q, k, v, dout, dlse, seen)


def computed(inputs: Inputs) -> tuple[Array, ...]:
    """Output, lse and the three gradients by the kernel; float32 products at the highest precision."""
    with jax.default_matmul_precision("highest"):
        return _computed(inputs.call, inputs.q, inputs.k, inputs.v, inputs.dout, inputs.dlse, inputs.operands)


@functools.partial(jax.jit, static_argnums=0)
def _computed(call, q, k, v, dout, dlse, operands):
    (out, lse), pullback = jax.vjp(lambda q, k, v: attend(call, (q, k, v), operands), q, k, v)
    return (out, lse, *pullback((dout, dlse)))


def expected(inputs: Inputs) -> tuple[Array, ...]:
    """The same by the dense oracle in float32, in the layout of the inputs."""
    swap = (lambda x: x) if inputs.call.layout == "bshd" else lambda x: jnp.swapaxes(x, 1, 2)
    q, k, v, dout = (swap(x).astype(jnp.float32) for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
    dlse = jnp.where(jnp.isnan(inputs.dlse), 0.0, inputs.dlse)
    out, lse, *grads = _expected(q, k, v, dout, dlse, inputs.seen, inputs.operands.scale)
    return (swap(out), lse, *(swap(grad) for grad in grads))


@functools.partial(jax.jit, static_argnums=6)
def _expected(q, k, v, dout, dlse, seen, scale):
    operands = Operands(scale=scale, dense=seen)
    with jax.default_matmul_precision("highest"):
        (out, lse), pullback = jax.vjp(lambda q, k, v: reference_attention(q, k, v, operands), q, k, v)
        return (out, lse, *pullback((dout, dlse)))


# How often a value is rounded to the arrays' dtype on the way to each result. out: the weights, the result. dv: the
# weights, the result. dq and dk: the output inside delta, the weights' gradient, the result. lse: never.
_ROUNDINGS = {"out": 2, "lse": 0, "dq": 3, "dk": 3, "dv": 2}


def tolerance(name: str, dtype: str, dim: int, length: int) -> float:
    """The relative root-mean-square error that rounding explains.

    Each rounding to the dtype contributes at most its unit roundoff (half of eps), relative to the terms of a sum of
    terms with independent signs, hence to the sum. Sums in float32 over `dim` and over `length` terms, in any order,
    contribute eps times the square root of the number of terms, in the kernel and in the oracle alike; they also
    perturb the exponents, and the exponential itself is good to a few units in the last place.
    """
    wide = float(jnp.finfo(jnp.float32).eps)
    sums = 2 * wide * (math.sqrt(dim) + math.sqrt(length) + 4)
    return _ROUNDINGS[name] * float(jnp.finfo(dtype).eps) / 2 + sums


@dataclasses.dataclass(frozen=True)
class Errors:
    """Relative root-mean-square error, largest error over the largest magnitude, and what is wrong ("" if nothing)."""

    rms: float
    largest: float
    fault: str


def compare(name: str, found: ArrayLike, wanted: ArrayLike, dtype: str, dim: int, length: int) -> Errors:
    """Both errors against their bounds. Where the oracle is 0 in a whole row, or -inf, the kernel has to be exact.

    A single element's error is allowed the same share of the largest magnitude, twice: terms may exceed their sum.
    """
    got, want = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    if got.shape != want.shape:
        return Errors(math.inf, math.inf, f"{name} has shape {got.shape}, not {want.shape}")
    dead = np.isneginf(want) if name == "lse" else np.broadcast_to(~want.any(axis=-1, keepdims=True), want.shape)
    exact = np.isneginf(got[dead]) if name == "lse" else got[dead] == 0
    if not exact.all():
        return Errors(math.inf, math.inf, f"{name} of rows that see nothing is not {'-inf' if name == 'lse' else 0}")
    got, want = got[~dead], want[~dead]
    if not np.isfinite(got).all():
        return Errors(math.inf, math.inf, f"{name} has {np.sum(~np.isfinite(got))} values that are not finite")
    error, bound = got - want, tolerance(name, dtype, dim, length)
    rms = float(np.sqrt(np.mean(error**2) / np.mean(want**2)))
    largest = float(np.max(np.abs(error)) / np.max(np.abs(want)))
    if rms > bound or largest > 2 * bound:
        return Errors(rms, largest, f"{name}: rms error {rms:.1e}, largest {largest:.1e}, bound {bound:.1e}")
    return Errors(rms, largest, "")
