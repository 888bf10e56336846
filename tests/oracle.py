"""The law in plain NumPy: masks as predicates, attention and its gradients in float64, how far off a result may be.

Nothing here uses eqx_attn's own arithmetic, so that no mistake can be on both sides.
"""

import collections
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import eqx_attn
from eqx_attn import _resolve, _tuning
from eqx_attn._masks import And, Dense

NAMES = ("out", "lse", "dq", "dk", "dv")

jit = functools.partial(jax.jit, compiler_options=dict(xla_backend_optimization_level=0))
"""For programs of tests, which are small and run once: compiling them is what takes the time."""


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Arrays of one call in `layout`, with random cotangents: a uniform one would hide a permuted gradient."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    dout: jax.Array
    dlse: jax.Array
    layout: str

    @property
    def arrays(self):
        return self.query, self.key, self.value


def random_inputs(
    key, q_seq, kv_seq, *, heads=(4, 2), dims=(16, 16), batch=(2,), dtype="float32", layout="bshd"
) -> Inputs:
    """Normal arrays; the values are off centre, so that a lost weight shows in the output."""
    (q_heads, kv_heads), (qk_dim, v_dim) = heads, dims
    generator = np.random.default_rng(np.asarray(jax.random.key_data(key)))  # NumPy compiles nothing

    def array(seq, heads, dim, mean=0.0):
        x = generator.normal(mean, size=(*batch, seq, heads, dim))
        return jnp.asarray((x if layout == "bshd" else np.swapaxes(x, -3, -2)).astype(jnp.dtype(dtype)))

    lse_dtype = "float64" if dtype == "float64" else "float32"
    return Inputs(
        query=array(q_seq, q_heads, qk_dim),
        key=array(kv_seq, kv_heads, qk_dim),
        value=array(kv_seq, kv_heads, v_dim, 0.5),
        dout=array(q_seq, q_heads, v_dim),
        dlse=jnp.asarray(generator.normal(size=(*batch, q_heads, q_seq)).astype(lse_dtype)),
        layout=layout,
    )


def visible(mask: Any, shape: tuple[int, ...]) -> np.ndarray:
    """The predicate of `mask`, as its docstring reads, in `shape`: `[*batch, q_heads, q_seq, kv_seq]`."""
    if isinstance(mask, And):
        segments = next((part for part in flatten(mask) if isinstance(part, eqx_attn.Segments)), None)
        seen = np.ones(shape, bool)
        for part in flatten(mask):
            seen &= _visible(part, shape, segments)
        return seen
    return _visible(mask, shape, mask if isinstance(mask, eqx_attn.Segments) else None)


def flatten(mask):
    return [part for inner in mask.masks for part in flatten(inner)] if isinstance(mask, And) else [mask]


def _visible(mask, shape, segments):
    q_seq, kv_seq = shape[-2:]
    if isinstance(mask, eqx_attn.Full):
        return np.ones(shape, bool)
    if isinstance(mask, Dense):
        return np.broadcast_to(np.asarray(mask.visible), shape)
    if isinstance(mask, eqx_attn.Segments):
        q_ids, kv_ids = _rows(mask.q_ids, shape, q_seq), _rows(mask.kv_ids, shape, kv_seq)
        same = (q_ids[..., :, None] == kv_ids[..., None, :]) & (q_ids[..., :, None] > 0)
        return np.broadcast_to(same[..., None, :, :], shape)
    if isinstance(mask, eqx_attn.BlockSparse):
        (rows, columns), seen = mask.block_size, np.asarray(mask.seen)
        seen = seen[..., np.arange(q_seq) // rows, :][..., np.arange(kv_seq) // columns]
        return np.broadcast_to(seen, shape)
    q_positions, kv_positions = _positions(segments, mask.alignment, shape)
    if isinstance(mask, eqx_attn.Chunked | eqx_attn.Dilated):
        q_positions, kv_positions = q_positions[..., None, :, None], kv_positions[..., None, None, :]
        if isinstance(mask, eqx_attn.Chunked):
            return np.broadcast_to(q_positions // mask.size == kv_positions // mask.size, shape)
        return np.broadcast_to((q_positions - kv_positions) % mask.step == 0, shape)
    if isinstance(mask, eqx_attn.PrefixLM):
        prefix = np.asarray(mask.prefix)
        inside = prefix if prefix.dtype == bool else kv_positions < np.broadcast_to(prefix, shape[:-3])[..., None]
        past = kv_positions[..., None, :] <= q_positions[..., :, None]
        return np.broadcast_to((past | inside[..., None, :])[..., None, :, :], shape)
    distance = (kv_positions[..., None, :] - q_positions[..., :, None])[..., None, :, :]
    left, right = (None, 0) if isinstance(mask, eqx_attn.Causal) else (mask.left, mask.right)
    seen = np.ones(distance.shape, bool)
    if left is not None:
        seen &= distance >= -left
    if right is not None:
        seen &= distance <= right
    return np.broadcast_to(seen, shape)


def _positions(segments, alignment, shape):
    """Positions of queries and keys, `[*batch, seq]`: row numbers, ranks within the id, or what the user gave."""
    q_seq, kv_seq = shape[-2:]
    if segments is None:
        shift = kv_seq - q_seq if alignment == "bottom_right" else 0
        return np.broadcast_to(np.arange(q_seq) + shift, (*shape[:-3], q_seq)), np.arange(kv_seq)
    if segments.explicit_positions:
        assert alignment == "top_left"
        return _rows(segments.q_positions, shape, q_seq), _rows(segments.kv_positions, shape, kv_seq)
    q_ids, kv_ids = _rows(segments.q_ids, shape, q_seq), _rows(segments.kv_ids, shape, kv_seq)
    q_positions = np.apply_along_axis(ranks, -1, q_ids)
    if alignment == "bottom_right":
        for index in np.ndindex(shape[:-3]):
            for token, segment in enumerate(q_ids[index]):
                q_positions[index][token] += (kv_ids[index] == segment).sum() - (q_ids[index] == segment).sum()
    return q_positions, np.apply_along_axis(ranks, -1, kv_ids)


def ranks(ids):
    """How many tokens of its own id come before each token."""
    seen: collections.Counter = collections.Counter()
    result = []
    for segment in ids:
        result.append(seen[int(segment)])
        seen[int(segment)] += 1
    return np.array(result)


def _rows(array, shape, seq):
    return np.broadcast_to(np.asarray(array, np.int64), (*shape[:-3], seq))


def score_shape(inputs: Inputs) -> tuple[int, ...]:
    """`[*batch, q_heads, q_seq, kv_seq]`."""
    kv_seq = inputs.key.shape[-3 if inputs.layout == "bshd" else -2]
    return (*inputs.dlse.shape, kv_seq)


@dataclasses.dataclass(frozen=True)
class Extras:
    """The options of a call: `bias` as given, `sinks` `[q_heads]`, and `kept` `[*batch, q_heads, q_seq, kv_seq]` of dropout."""

    bias: Any = None
    sinks: Any = None
    softcap: float | None = None
    kept: np.ndarray | None = None
    rate: float = 0.0


def expected(
    inputs: Inputs, mask, scale=None, product_eps=None, extras: Extras = Extras()
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Each result with the error that it may have, both in float64 and in the arrays' layout.

    Also `max_logit`, and `dbias` and `dsinks` where the options have them.

    The allowance is the first-order error of the algorithm. Roundings are as often up as down, so a sum's terms bring
    their errors in quadrature, and adding up n terms brings sqrt(n) roundings (`wide`: of the accumulator, float32 or
    float64). A weight p = exp(score - lse) is off, relatively, by its score's error, and its row by the lse's, which its
    elements share. Weights and score gradients are rounded to the arrays' dtype (`narrow`) before a product, results at
    the end, and delta = out . dout - dlse is made from a rounded out. A rounding counts as one unit in the last place,
    which is 3.5 standard deviations of it; the sum of all that is doubled for the worst of some 1e5 elements.

    `product_eps` is the rounding of the factors of a product where the precision asked for is below `highest`.
    """
    finfo = jnp.finfo(inputs.query.dtype)
    narrow = float(finfo.eps)
    wide = float(np.finfo(np.float64 if inputs.query.dtype == jnp.float64 else np.float32).eps)
    factor = product_eps or wide
    heads_first = inputs.layout == "bhsd"
    q, k, v, dout = (
        np.asarray(x, np.float64) if heads_first else np.swapaxes(np.asarray(x, np.float64), -3, -2)
        for x in (*inputs.arrays, inputs.dout)
    )
    dlse = np.asarray(inputs.dlse, np.float64)
    group = q.shape[-3] // k.shape[-3]
    k, v = k.repeat(group, -3), v.repeat(group, -3)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    seen = visible(mask, score_shape(inputs)) if not isinstance(mask, np.ndarray) else mask
    (q_seq, qk_dim), (kv_seq, v_dim) = q.shape[-2:], v.shape[-2:]

    raw = scale * q @ k.mT
    part = np.zeros(()) if extras.softcap is None else np.tanh(raw / extras.softcap)
    scores, slope = (raw, 1.0) if extras.softcap is None else (extras.softcap * part, 1 - part**2)
    if extras.bias is not None:
        bias = np.asarray(extras.bias, np.float64)
        scores, seen = scores + np.where(np.isinf(bias), 0, bias), seen & (bias > -np.inf)
    scores = np.where(seen, scores, -np.inf)
    max_logit = scores.max(-1)
    top = scores.max(-1, keepdims=True)
    sinks = np.full((1, 1), -np.inf) if extras.sinks is None else np.asarray(extras.sinks, np.float64)[:, None]
    top = np.maximum(top, sinks[..., None])
    alive = top > -np.inf
    top = np.where(alive, top, 0)
    weights = np.exp(scores - top)
    total = np.where(alive, weights.sum(-1, keepdims=True) + np.exp(sinks[..., None] - top), 1)
    p = weights / total
    lse = np.where(alive, top + np.log(total), -np.inf)
    kept = 1.0 if extras.kept is None else extras.kept / (1 - extras.rate)
    dropped = p * kept
    out = dropped @ v
    delta = np.where(alive, (out * dout).sum(-1, keepdims=True) - dlse[..., None], 0)
    dp = kept * (dout @ v.mT)
    dbias = p * (dp - delta)
    ds = scale * slope * dbias
    sink_weights = np.where(alive, np.exp(sinks[..., None] - np.where(alive, lse, 0)), 0)

    def norm(x, y):
        """`x @ y` with its terms added in quadrature."""
        return np.sqrt(x**2 @ y**2)

    raw_error = abs(scale) * (wide * np.sqrt(qk_dim) + factor) * norm(q, k.mT)
    score_error = slope * raw_error + (0 if extras.softcap is None else 4 * wide * extras.softcap)
    score_error = np.where(seen, score_error + 3 * wide * abs(np.where(seen, scores, 0)), 0)
    row_error = np.sqrt(((p * score_error) ** 2).sum(-1, keepdims=True))
    row_error = row_error + wide * (np.sqrt(kv_seq) + 3 * abs(np.where(alive, lse, 0)))
    own_error = score_error + narrow + factor  # of a weight, besides its row's
    shown = abs(scale) * slope * p * abs(dp - delta)
    dp_error = kept * (wide * np.sqrt(v_dim) + factor) * norm(dout, v.mT)
    delta_error = np.sqrt(((p * own_error * dp) ** 2).sum(-1, keepdims=True)) + row_error * abs(delta + dlse[..., None])
    delta_error = delta_error + (narrow + wide * np.sqrt(v_dim)) * np.sqrt(((out * dout) ** 2).sum(-1, keepdims=True))
    delta_error = np.where(alive, delta_error + wide * abs(dlse[..., None]), 0)
    slope_error = 0 if extras.softcap is None else 8 * wide + 2 * abs(part) * raw_error / extras.softcap
    ds_error = own_error * shown + abs(scale) * p * (slope * dp_error + slope_error * abs(dp - delta))
    shared_error = row_error * shown + abs(scale) * slope * p * delta_error
    q_sum, kv_sum = wide * np.sqrt(q_seq * group) + factor, wide * np.sqrt(kv_seq) + factor

    def sum_heads(x):
        """Over the query heads that share a key/value head."""
        return x.reshape(*x.shape[:-3], x.shape[-3] // group, group, *x.shape[-2:]).sum(-3)

    values = dict(
        out=out,
        lse=lse[..., 0],
        dq=ds @ k,
        dk=sum_heads(ds.mT @ q),
        dv=sum_heads(dropped.mT @ dout),
        max_logit=max_logit.max(-1),
    )
    allowed = dict(
        out=norm(dropped * (own_error + kv_sum), v) + row_error * abs(out),
        lse=row_error[..., 0],
        dq=norm(ds_error + kv_sum * abs(ds), k)
        + row_error * abs(ds @ k)
        + abs(scale) * delta_error * abs((slope * p) @ k),
        dk=np.sqrt(sum_heads(norm((ds_error + shared_error + q_sum * abs(ds)).mT, q) ** 2)),
        dv=np.sqrt(sum_heads(norm((dropped * (own_error + row_error + q_sum)).mT, dout) ** 2)),
        max_logit=np.where(np.isinf(max_logit), 0, score_error.max(-1)).max(-1),
    )
    if extras.bias is not None:
        bias_error = own_error * abs(dbias) + p * dp_error + row_error * abs(dbias) + p * delta_error
        values["dbias"] = _summed(dbias, bias.shape)
        size = dbias.size / bias.size
        allowed["dbias"] = np.sqrt(_summed((bias_error + wide * np.sqrt(size) * abs(dbias)) ** 2, bias.shape))
    if extras.sinks is not None:
        values["dsinks"] = -(sink_weights * delta).reshape(-1, *delta.shape[-3:]).sum((0, 2, 3))
        sink_error = sink_weights * (delta_error + (row_error + wide * np.sqrt(q_seq)) * abs(delta))
        allowed["dsinks"] = np.sqrt((sink_error**2).reshape(-1, *delta.shape[-3:]).sum((0, 2, 3)))
    for name in values:
        rounding = wide if name in ("lse", "max_logit", "dsinks") else narrow
        if name == "dbias":
            rounding = float(jnp.finfo(extras.bias.dtype).eps)
        allowed[name] = 2 * allowed[name] + rounding * abs(np.where(np.isinf(values[name]), 0, values[name]))
        allowed[name] = allowed[name] + float(finfo.smallest_subnormal)

    def back(name, x):
        return np.swapaxes(x, -3, -2) if name in ("out", "dq", "dk", "dv") and not heads_first else x

    return {name: (back(name, values[name]), back(name, allowed[name])) for name in values}


def _summed(x, shape):
    """`x` summed over the axes along which an array of `shape` was broadcast."""
    x = x.sum(tuple(range(x.ndim - len(shape))))
    return x.sum(tuple(axis for axis, size in enumerate(shape) if size == 1 != x.shape[axis]), keepdims=True)


def results(inputs: Inputs, mask, **options) -> dict[str, np.ndarray]:
    """What `eqx_attn.attention` gives: outputs and the gradients of both of them."""
    tiles = _resolve.XLA_TILE, _tuning._triton_tiles  # tests replace them, which jit does not see
    options = tuple(sorted(options.items()))
    (out, lse, _), grads = _run(inputs.layout, options, tiles, mask, inputs.arrays, (inputs.dout, inputs.dlse))
    assert out.dtype == inputs.query.dtype and lse.dtype == inputs.dlse.dtype
    assert [grad.dtype for grad in grads] == [x.dtype for x in inputs.arrays]
    return dict(zip(NAMES, (np.asarray(x, np.float64) for x in (out, lse, *grads)), strict=True))


@functools.partial(jit, static_argnums=(0, 1, 2))
def _run(layout, options, tiles, mask, arrays, cotangents):
    def call(query, key, value):
        return eqx_attn.attention(query, key, value, mask=mask, layout=layout, return_lse=True, **dict(options))

    primal, pull_back = jax.vjp(call, *arrays)
    return primal, pull_back(eqx_attn.AttentionOutput(*cotangents))


def assert_matches(found: dict, wanted: dict, names=NAMES):
    """Each element within its allowance: infinite where it should be, and nowhere NaN."""
    for name in names:
        value, allowed = wanted[name]
        got = np.asarray(found[name], np.float64)
        assert got.shape == value.shape, f"{name} has shape {got.shape} instead of {value.shape}"
        assert not np.isnan(got).any(), f"{name} holds NaN"
        infinite = np.isinf(value)
        assert (np.isinf(got) == infinite).all(), f"{name} is infinite elsewhere"
        error = np.where(infinite, 0, abs(np.where(infinite, 0, got) - np.where(infinite, 0, value)))
        worst = np.unravel_index(np.argmax(error - allowed), error.shape)
        assert error[worst] <= allowed[worst], (
            f"{name}{list(map(int, worst))} is {got[worst]} instead of {value[worst]}: off by {error[worst]:.2e}, "
            f"allowed {allowed[worst]:.2e}"
        )


def check(inputs: Inputs, mask, scale=None, **options):
    """Outputs, lse and every gradient of `attention` against the oracle."""
    assert_matches(results(inputs, mask, scale=scale, **options), expected(inputs, mask, scale))
