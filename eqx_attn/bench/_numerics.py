"""A kernel against the dense oracle: on which inputs, and what error its arithmetic explains."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike

from .. import BlockSparse, Causal, Dropout, Full, Mask, Segments, SlidingWindow
from .._call import Call, Route
from .._codegen import KernelSpec
from .._context import current_context
from .._masks import Alignment
from .._operands import Operands
from .._reference import reference_attention, visible_keys
from .._serve import call_operands, learned_of, Options, prepare, sizes_of
from .._tuning import default_tiles
from .._vjp import attend, Learned, packed

BATCH, Q_HEADS, KV_HEADS = 2, 4, 2
NAMES = ("out", "lse", "max_logit", "dq", "dk", "dv", "dbias", "dsinks")


def names_of(spec: KernelSpec) -> tuple[str, ...]:
    """The results of a kernel, in the order of `NAMES`."""
    absent = {"max_logit": not spec.maxlogit, "dbias": not spec.bias, "dsinks": not spec.sinks}
    return tuple(name for name in NAMES if not absent.get(name, False))


@dataclasses.dataclass(frozen=True)
class Shape:
    """Lengths, and how a band is aligned. Aligned to the bottom right, more queries than keys leave dead rows."""

    q_seq: int
    kv_seq: int
    alignment: Alignment = "top_left"


# Ragged both ways, and multiples of 16, which Triton compiles to other code.
SHAPES = (Shape(333, 461), Shape(461, 333, "bottom_right"), Shape(512, 512))
SMALL_SHAPES = (Shape(45, 77), Shape(77, 45, "bottom_right"))  # for an interpreter


def shape_for(spec: KernelSpec, shape: Shape) -> Shape:
    """`shape`, with as many keys as queries where one array holds both."""
    return dataclasses.replace(shape, kv_seq=shape.q_seq) if spec.layout == "qkv" else shape


def mask_of(spec: KernelSpec, shape: Shape) -> Mask:
    """A mask of the spec's kind. Ids are in no order, with padding on both sides and an id that only queries have."""
    window = shape.q_seq // 5
    bands = {
        "full": Full(),
        "causal": Causal(shape.alignment),
        "window": SlidingWindow(window, window // 3, shape.alignment),
    }
    mask = bands[str(spec.mask)]
    random = np.random.default_rng(1)
    if spec.segments:
        ids = [
            np.repeat(random.permutation(length // 16 + 1), 16)[:length] % count
            for length, count in ((shape.q_seq, 6), (shape.kv_seq, 5))
        ]
        # Id 0 is padding; 5 is an id that no key has.
        q_ids, kv_ids = (np.stack([row, np.roll(row, 7)]).astype(np.int32) for row in ids)
        mask &= Segments(jnp.asarray(q_ids), jnp.asarray(kv_ids))
    if spec.blocks:  # one map for each head, of blocks that no tile of a kernel matches
        blocks = (-(-shape.q_seq // 48), -(-shape.kv_seq // 80))
        mask &= BlockSparse(random.random((1, Q_HEADS, *blocks)) < 0.5, (48, 80))
    if spec.dense:
        mask &= jnp.asarray(random.random((BATCH, 1, shape.q_seq, shape.kv_seq)) < 0.5)
    return mask


def options_of(spec: KernelSpec, shape: Shape, dtype: str) -> Options:
    """A call's options that `spec` serves. A bias is shared by examples, by heads, or by neither, as the shape has it."""
    bias, sinks, dropout = jax.random.split(jax.random.key(1), 3)
    shared = {"top_left": (1, Q_HEADS), "bottom_right": (BATCH, 1)}[shape.alignment]
    bias_shape = (*(shared if shape.q_seq != shape.kv_seq else (BATCH, Q_HEADS)), shape.q_seq, shape.kv_seq)
    return Options(
        mask_of(spec, shape),
        bias=jax.random.normal(bias, bias_shape, dtype) if spec.bias else None,
        sinks=2 * jax.random.normal(sinks, (Q_HEADS,), jnp.float32) if spec.sinks else None,
        softcap=2.0 if spec.softcap else None,
        dropout=Dropout(0.2, dropout) if spec.dropout else None,
        deterministic=True,
        return_max_logit=spec.maxlogit,
    )


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Arrays in the spec's layout and the call of its kernel. `seen` is the dense mask, for the oracle.

    `q`, `k` and `v` are apart, in `bshd` where the layout is a packed one.
    """

    call: Call
    operands: Operands
    learned: Learned
    q: Array
    k: Array
    v: Array
    dout: Array
    dlse: Array
    seen: Array


def make_inputs(spec: KernelSpec, shape: Shape, dtype: str) -> Inputs:
    """Random arrays and cotangents. Raises AssertionError where the call would be served by another spec."""
    shape = shape_for(spec, shape)
    keys = jax.random.split(jax.random.key(0), 5)

    def random(key, seq, heads, dim):
        sizes = (BATCH, heads, seq, dim) if spec.layout == "bhsd" else (BATCH, seq, heads, dim)
        return jax.random.normal(key, sizes, dtype)

    q = random(keys[0], shape.q_seq, Q_HEADS, spec.qk_dim)
    k = random(keys[1], shape.kv_seq, KV_HEADS, spec.qk_dim)
    v = random(keys[2], shape.kv_seq, KV_HEADS, spec.v_dim)
    dout = random(keys[3], shape.q_seq, Q_HEADS, spec.v_dim)
    layout, sizes = str(spec.layout), sizes_of(q, k, v, "bhsd" if spec.layout == "bhsd" else "bshd")
    options = options_of(spec, shape, dtype)
    request, plan = prepare(sizes, layout, options)
    if request.spec(spec.target) != spec:
        raise AssertionError(f"the inputs made for {spec.name} belong to {request.spec(spec.target).name}")
    operands = call_operands(plan, spec.qk_dim**-0.5, sizes, layout, options)
    seen = visible_keys(operands, shape.q_seq, shape.kv_seq)
    seen = jnp.broadcast_to(seen, (BATCH, seen.shape[1], shape.q_seq, shape.kv_seq))
    dlse = jax.random.normal(keys[4], (BATCH, Q_HEADS, shape.q_seq), jnp.float32)
    # A sink's gradient is a sum over rows, which must not cancel, or rounding is all that is left of it. Without sinks nothing
    # of a dead row's cotangent may get through.
    dlse = jnp.abs(dlse) if spec.sinks else jnp.where(jnp.any(seen, axis=-1), dlse, jnp.nan)
    tiles = default_tiles(spec, dtype, shape.q_seq, shape.kv_seq)
    call = Call(layout, Route(str(spec.target), spec, tiles), (), current_context())
    return Inputs(call, operands, learned_of(options, sizes), q, k, v, dout, dlse, seen)


jax.tree_util.register_dataclass(
    Inputs, [field.name for field in dataclasses.fields(Inputs) if field.name != "call"], ["call"]
)


@jax.jit
def computed(inputs: Inputs) -> tuple[Array, ...]:
    """The results that `names_of` names, by the kernel; float32 products at the highest precision."""

    def kernel(q, k, v, learned):
        return attend(inputs.call, packed((q, k, v), inputs.call.layout), inputs.operands, learned)

    with jax.default_matmul_precision("highest"):
        return _results(kernel, (inputs.q, inputs.k, inputs.v), inputs)


def expected(inputs: Inputs) -> tuple[Array, ...]:
    """The same by the dense oracle in float32 on the CPU, in the layout of the inputs.

    XLA searches for the fastest exact product of each shape on a GPU: 40 seconds for arrays that a CPU does at once.
    """
    return _expected(jax.device_put(inputs, jax.local_devices(backend="cpu")[0]))


@jax.jit
def _expected(inputs: Inputs) -> tuple[Array, ...]:

    def swap(x):
        return jnp.swapaxes(x, 1, 2) if inputs.call.layout == "bhsd" else x

    def oracle(q, k, v, learned):
        operands = dataclasses.replace(
            inputs.operands,
            lower=None,
            upper=None,
            segments=None,
            blocks=None,
            dense=inputs.seen,
            bias=learned.bias,
            sinks=learned.sinks,
        )
        out, *others = reference_attention(swap(q), swap(k), swap(v), operands)
        return swap(out), *others

    wide = dataclasses.replace(inputs, dlse=jnp.where(jnp.isnan(inputs.dlse), 0.0, inputs.dlse))
    wide = jax.tree.map(lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, wide)
    with jax.default_matmul_precision("highest"):
        return _results(oracle, (wide.q, wide.k, wide.v), wide)


def _results(function, arrays, inputs: Inputs) -> tuple[Array, ...]:
    """What `function(q, k, v, learned)` gives and the gradients, in the order of `NAMES`."""
    (out, lse, *max_logit), pullback = jax.vjp(function, *arrays, inputs.learned)
    zeros = [jnp.zeros_like(x) for x in max_logit]
    *grads, learned = pullback((inputs.dout, inputs.dlse, *zeros))
    others = [x for x in (learned.bias, learned.sinks) if x is not None]
    return (out, lse, *max_logit, *grads, *others)


# How often a value is rounded to the arrays' dtype on the way to each result. out: the weights, the result. dv: the
# weights, the result. dq and dk: the output inside delta, the weights' gradient, the result. dbias: the output, the result.
# dsinks: the output. lse and max_logit: never.
_ROUNDINGS = {"out": 2, "lse": 0, "max_logit": 0, "dq": 3, "dk": 3, "dv": 2, "dbias": 2, "dsinks": 1}


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
    of_scores = name in ("lse", "max_logit")
    dead = np.isneginf(want) if of_scores else np.broadcast_to(~want.any(axis=-1, keepdims=True), want.shape)
    exact = np.isneginf(got[dead]) if of_scores else got[dead] == 0
    if not exact.all():
        return Errors(
            math.inf,
            math.inf,
            f"{name} of rows that see nothing is not {'-inf' if of_scores else 0}",
        )
    got, want = got[~dead], want[~dead]
    if not np.isfinite(got).all():
        return Errors(math.inf, math.inf, f"{name} has {np.sum(~np.isfinite(got))} values that are not finite")
    error, bound = got - want, tolerance(name, dtype, dim, length)
    rms = float(np.sqrt(np.mean(error**2) / np.mean(want**2)))
    largest = float(np.max(np.abs(error)) / np.max(np.abs(want)))
    if rms > bound or largest > 2 * bound:
        return Errors(rms, largest, f"{name}: rms error {rms:.1e}, largest {largest:.1e}, bound {bound:.1e}")
    return Errors(rms, largest, "")
