"""From checked arguments to a result: the mask planned, an implementation resolved, the call made."""

import dataclasses
import functools
import math
import os
import re
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from . import _dropout
from ._call import Request
from ._dropout import Dropout
from ._mask_function import FromFunction
from ._masks import Mask, parts
from ._mods import check_score_mod, Mod, trace_mask_mod, trace_score_mod
from ._operands import Operands
from ._plan import flat_scores, MaskPlan, plan_mask, UNBOUNDED
from ._reference import reference_attention
from ._resolve import resolve
from ._validate import check_bias, check_dropout, check_sinks, check_softcap
from ._vjp import attend, Learned, unpacked
from .sharding._batch import check_sharding, on_mesh, split_batch
from .sharding._context import ContextParallel
from .sharding._place import Spread


class AttentionOutput(NamedTuple):
    """What `attention` returns when more than the output is asked for.

    `out` has the query's shape with the value's head dim; `lse`, `[*batch, q_heads, q_seq]` in float32, is the natural
    logarithm of the sum of the exponentials of a row's visible scores (and of its head's sink), -inf where there is none.
    `max_logit`, `[*batch, q_heads]` in float32, is the largest visible score of a head, -inf where it has none; None unless
    asked for. It has no gradient.
    """

    out: Array
    lse: Array
    max_logit: Array | None = None


@dataclasses.dataclass(frozen=True)
class Options:
    """The arguments of `attention` that are not the three arrays and their layout."""

    mask: Mask
    scale: float | None = None
    bias: Array | None = None
    sinks: Array | None = None
    softcap: float | None = None
    dropout: Dropout | None = None
    implementation: str | None = None
    deterministic: bool | None = None
    return_max_logit: bool = False
    context: ContextParallel | None = None
    score_mod: Callable | None = None
    seeds: Array | None = None
    """Dropout's seeds of each example and head, where examples lie in another order than that of the arguments."""
    numbers: Array | None = None
    """The same for the examples' numbers, which functions are given."""
    examples: int | None = None
    """How many of them there are in all, where the arrays have only some."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The dimensions of a call, whatever its arrays look like."""

    batch_shape: tuple[int, ...]
    q_seq: int
    kv_seq: int
    q_heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    dtype: str

    @property
    def batch(self) -> int:
        """The number of examples."""
        return math.prod(self.batch_shape)

    @property
    def scores(self) -> tuple[int, ...]:
        """`[*batch, q_heads, q_seq, kv_seq]`."""
        return (*self.batch_shape, self.q_heads, self.q_seq, self.kv_seq)


def sizes_of(query, key, value, layout: str) -> Sizes:
    """The sizes of three arrays in `bshd` or `bhsd`."""
    seq, heads = (-3, -2) if layout == "bshd" else (-2, -3)
    return Sizes(
        batch_shape=query.shape[:-3],
        q_seq=query.shape[seq],
        kv_seq=key.shape[seq],
        q_heads=query.shape[heads],
        kv_heads=key.shape[heads],
        qk_dim=query.shape[-1],
        v_dim=value.shape[-1],
        dtype=str(query.dtype),
    )


def serve(arrays: tuple[Array, ...], sizes: Sizes, layout: str, options: Options) -> AttentionOutput:
    """The result of a call. `arrays` are in `layout`, a kernel's, with any batch axes."""
    spread = Spread.of(options.context, arrays)
    check_sharding(arrays, layout, sizes.q_heads, sizes.kv_heads, options.context)
    if len(sizes.batch_shape) > 1 and on_mesh(arrays):
        return _serve_mapped(arrays, sizes, layout, options)
    if spread is not None:
        spread.check(options.implementation, sizes)
        options = dataclasses.replace(options, mask=spread.mask(options.mask))
        arrays, layout = unpacked(arrays, layout, sizes.kv_heads), "bhsd" if layout == "bhsd" else "bshd"
    request, plan = prepare(sizes, layout, options, spread)
    call = resolve(request, options.implementation)
    scale = float(sizes.qk_dim**-0.5 if options.scale is None else options.scale)
    if scale <= 0:  # the kernels take the maximum of scores before they scale
        arrays, scale = _negated(arrays, scale, layout)
    operands = call_operands(plan, scale, sizes, request.layout, options, spread)
    learned = learned_of(options, sizes, plan.score_mod)
    arrays = tuple(jnp.reshape(x, (sizes.batch, *x.shape[-3:])) for x in arrays)
    if call.default.implementation == "reference":
        operands = dataclasses.replace(operands, bias=learned.bias, sinks=learned.sinks)
        results = _reference(layout, arrays, operands, options.score_mod, plan.functions)
    elif spread is None:
        results = attend(call, arrays, operands, learned)
    else:
        results = spread.attend(options.mask, call, arrays, operands, learned)
    out, lse, *max_logit = (x.reshape(*sizes.batch_shape, *x.shape[1:]) for x in results)
    return AttentionOutput(out, lse, *(jax.lax.stop_gradient(jnp.max(x, axis=-1)) for x in max_logit))


def _serve_mapped(arrays, sizes: Sizes, layout: str, options: Options) -> AttentionOutput:
    """`serve` under `jax.vmap` over the first of several batch axes.

    On a mesh a reshape would have to move examples where another axis than the first is sharded; mapped axes are folded
    on each device.
    """
    spread = Spread.of(options.context, arrays)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (options.mask, options.bias))
    jax.eval_shape(
        lambda *x: _check(sizes, layout, options, spread, *x), *shapes
    )  # messages name the shapes that were given
    if options.seeds is None and (dropout := _dropout_of(options)) is not None:
        seeds = _dropout.seeds(dropout.key, sizes.batch, sizes.q_heads)
        options = dataclasses.replace(options, seeds=seeds.reshape(*sizes.batch_shape, sizes.q_heads))
    if options.numbers is None and has_functions(options):
        numbers = jnp.arange(sizes.batch, dtype=jnp.int32).reshape(sizes.batch_shape)
        options = dataclasses.replace(options, numbers=numbers, examples=sizes.batch)
    inner = dataclasses.replace(sizes, batch_shape=sizes.batch_shape[1:])
    arguments, axes = split_batch((options.mask, options.bias, options.seeds, options.numbers), arrays[0])

    def of_one(arrays, arguments):
        mask, bias, seeds, numbers = arguments
        changed = dataclasses.replace(options, mask=mask, bias=bias, seeds=seeds, numbers=numbers)
        return serve(arrays, inner, layout, changed)

    return jax.vmap(of_one, in_axes=(0, axes))(arrays, arguments)


def _check(sizes: Sizes, layout: str, options: Options, spread: Spread | None, mask: Mask, bias: Array | None) -> None:
    """Raises what a call with this mask and bias would."""
    options = dataclasses.replace(options, mask=mask, bias=bias)
    prepare(sizes, layout, options, spread)
    learned_of(options, sizes)


def prepare(sizes: Sizes, layout: str, options: Options, spread: Spread | None = None) -> tuple[Request, MaskPlan]:
    """What resolution looks at, and the mask in the kernels' terms.

    Where the call is `spread`, the request is of what one device computes and the mask of all of it.
    """
    check_bias(options.bias)
    check_sinks(options.sinks, sizes.q_heads)
    check_softcap(options.softcap)
    check_dropout(options.dropout)
    order = None if spread is None else spread.order
    plan = plan_mask(options.mask, sizes.batch_shape, sizes.q_heads, sizes.q_seq, sizes.kv_seq, order)
    plan = _with_traced(plan, options, sizes)
    if spread is not None:
        sizes = spread.sizes_on_device(sizes)
    used = dict(
        segments=plan.segments is not None,
        blocks=plan.blocks is not None,
        dense=plan.dense is not None,
        bias=options.bias is not None,
        softcap=options.softcap is not None,
        sinks=options.sinks is not None and (spread is None or not spread.merges_sinks),
        dropout=_dropout_of(options) is not None,
        maxlogit=options.return_max_logit,
    )
    request = Request(
        layout=layout,
        dtype=sizes.dtype,
        batch=sizes.batch,
        q_seq=sizes.q_seq,
        kv_seq=sizes.kv_seq,
        q_heads=sizes.q_heads,
        kv_heads=sizes.kv_heads,
        qk_dim=sizes.qk_dim,
        v_dim=sizes.v_dim,
        mask=_mask_kind(plan),
        options=tuple(name for name, is_used in used.items() if is_used),
        deterministic=options.deterministic,
        score_mod="" if plan.score_mod is None else plan.score_mod.digest,
        mask_mod="" if plan.mask_mod is None else plan.mask_mod.digest,
        dealt=order is not None and order.name != "contiguous",
    )
    return request, plan


def _with_traced(plan: MaskPlan, options: Options, sizes: Sizes) -> MaskPlan:
    """The plan with its functions and the score function traced, but not for the reference, which takes them as they are."""
    if options.score_mod is not None:
        check_score_mod(options.score_mod)
    if options.implementation == "reference" or not has_functions(options):
        return plan
    bounds = (options.examples or sizes.batch, sizes.q_heads, sizes.q_seq, sizes.kv_seq)
    wide = "float64" if sizes.dtype == "float64" else "float32"
    return dataclasses.replace(
        plan,
        mask_mod=trace_mask_mod(plan.functions, bounds) if plan.functions else None,
        score_mod=None if options.score_mod is None else trace_score_mod(options.score_mod, bounds, wide),
    )


def has_functions(options: Options) -> bool:
    """Whether there is a score function, or a mask's function."""
    return options.score_mod is not None or any(isinstance(part, FromFunction) for part in parts(options.mask))


def operands_for(plan: MaskPlan, scale: float) -> Operands:
    """What the kernel reads besides the arrays. A window's missing bound becomes one that always holds."""
    lower, upper = plan.lower, plan.upper
    if lower is not None and upper is None:
        upper = UNBOUNDED
    return Operands(
        scale=scale,
        lower=lower,
        upper=upper,
        segments=plan.segments,
        blocks=plan.blocks,
        dense=plan.dense,
    )


def call_operands(
    plan: MaskPlan, scale: float, sizes: Sizes, layout: str, options: Options, spread: Spread | None = None
) -> Operands:
    """`operands_for` with what the options of a call add."""
    return dataclasses.replace(
        operands_for(plan, scale),
        softcap=None if options.softcap is None else float(options.softcap),
        max_logit=options.return_max_logit,
        deterministic=xla_is_deterministic() if options.deterministic is None else options.deterministic,
        heads_of_kv=sizes.kv_heads if layout in ("qkv", "kv") else None,
        score_mod=None if plan.score_mod is None else plan.score_mod.program,
        mask_mod=None if plan.mask_mod is None else plan.mask_mod.program,
        mask_arrays=() if plan.mask_mod is None else plan.mask_mod.arrays(),
        **_dropout_operands(options, sizes),
        **_index_operands(options, sizes, spread),
    )


def xla_is_deterministic() -> bool:
    """Whether XLA itself has been told to give equal bits from run to run on a GPU."""
    names = "xla_gpu_deterministic_ops|xla_gpu_exclude_nondeterministic_ops"
    return re.search(rf"--({names})(=true|=1)?(\s|$)", os.environ.get("XLA_FLAGS", "")) is not None


def _dropout_of(options: Options) -> Dropout | None:
    """The dropout, unless it drops nothing."""
    return options.dropout if options.dropout is not None and options.dropout.rate > 0 else None


def _dropout_operands(options: Options, sizes: Sizes) -> dict:
    dropout = _dropout_of(options)
    if dropout is None:
        return {}
    return dict(
        dropout_rate=float(dropout.rate),
        dropout_seed=_dropout.seeds(dropout.key, sizes.batch, sizes.q_heads)
        if options.seeds is None
        else options.seeds,
    )


def _index_operands(options: Options, sizes: Sizes, spread: Spread | None) -> dict:
    """Where something depends on the indices, those."""
    functions = has_functions(options)
    if not functions and _dropout_of(options) is None:
        return {}
    arange = functools.partial(jnp.arange, dtype=jnp.int32)
    index = arange if spread is None else spread.order.positions
    found = dict(q_index=jnp.asarray(index(sizes.q_seq)), kv_index=jnp.asarray(index(sizes.kv_seq)))
    if functions:
        numbers = arange(sizes.batch) if options.numbers is None else options.numbers
        found |= dict(batch_index=numbers.reshape(sizes.batch), head_index=arange(sizes.q_heads))
    return found


def learned_of(options: Options, sizes: Sizes, score_mod: Mod | None = None) -> Learned:
    """Bias, sinks and a score function's arrays as the kernels take them."""
    bias, sinks = options.bias, options.sinks
    if bias is not None:
        bias = flat_scores(bias, "bias is an array", "[*batch, q_heads, q_seq, kv_seq]", sizes.scores)
    if sinks is not None:
        sinks = sinks.astype(jnp.float64 if sizes.dtype == "float64" else jnp.float32)[None]
    return Learned(bias, sinks, () if score_mod is None else score_mod.arrays())


def _negated(arrays, scale: float, layout: str):
    if layout in ("qkv", "kv") and len(arrays) == 1:
        raise ValueError(f"scale is {scale}: with packed arrays it must be above 0; give query, key and value apart")
    query, *others = arrays
    query, scale = (-query, -scale) if scale else (jnp.zeros_like(query), 1.0)
    return (query, *others), scale


def _mask_kind(plan: MaskPlan) -> str:
    if plan.lower is not None:
        return "window"
    return "full" if plan.upper is None else "causal"


def _reference(layout, arrays, operands, *functions):
    q, k, v = unpacked(arrays, layout, operands.heads_of_kv)
    if layout != "bhsd":
        return reference_attention(q, k, v, operands, *functions)
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    out, *others = reference_attention(q, k, v, operands, *functions)
    return jnp.swapaxes(out, 1, 2), *others
