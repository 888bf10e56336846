"""Score and mask functions as users write them, each with the law that it obeys: a bias, a softcap, a mask, a scaled query."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle

import eqx_attn
from eqx_attn import Mask

HEADS = (4, 2)


@dataclasses.dataclass(frozen=True)
class Variant:
    """`score_mod(parameters, sizes)` and `mask(parameters, sizes)` as of a call; `parameters(generator, sizes)` are arrays.

    `bias(parameters, sizes)` is the array `[batch, heads, q_seq, kv_seq]` that the score function adds, `temperature` what it
    multiplies the scores of a head with, `softcap` and `seen` say what else it does. `sizes` are batch, heads, q_seq, kv_seq.
    """

    parameters: Callable = lambda generator, sizes: {}
    score_mod: Callable | None = None
    mask: Callable = lambda parameters, sizes: eqx_attn.Full()
    bias: Callable | None = None
    temperature: str = ""
    softcap: float | None = None
    seen: Callable | None = None


def indices(sizes):
    """The four indices, to be broadcast."""
    return np.ix_(*map(np.arange, sizes))


def alibi(parameters, sizes):
    slopes = parameters["slopes"]

    def score_mod(score, batch, head, q_index, kv_index):
        return score + slopes[head] * (kv_index - q_index).astype(jnp.float32)

    return score_mod


def alibi_bias(parameters, sizes):
    _, head, q_index, kv_index = indices(sizes)
    return parameters["slopes"][head] * np.float32(kv_index - q_index) + jnp.zeros(sizes)


def relative(parameters, sizes):
    """Clipped distances, of a table in float16: its gradient has that dtype, and sums in float32."""
    table, last = parameters["table"], parameters["table"].shape[1] - 1

    def score_mod(score, batch, head, q_index, kv_index):
        bucket = jnp.clip(kv_index - q_index + last // 2, 0, last)
        return score + table[head, bucket].astype(jnp.float32)

    return score_mod


def relative_bias(parameters, sizes):
    _, head, q_index, kv_index = indices(sizes)
    last = parameters["table"].shape[1] - 1
    bucket = np.clip(kv_index - q_index + last // 2, 0, last)
    return parameters["table"].astype(jnp.float32)[head, bucket] + jnp.zeros(sizes)


def hand_written_softcap(parameters, sizes):
    return lambda s, b, h, q, k: 2 * jnp.tanh(s / 2)


def temperature(parameters, sizes):
    log_scale = parameters["log_scale"]
    return lambda score, b, h, q, k: score * jnp.exp(log_scale)[h]


def soft_window(parameters, sizes):
    """A window with a soft edge, of a width that is learned, in another place for each example."""
    width, centre = parameters["width"], parameters["centre"]

    def score_mod(score, batch, head, q_index, kv_index):
        distance = jnp.abs((kv_index - q_index).astype(jnp.float32) + centre[batch % 2])
        return score - jax.nn.softplus(distance - width)

    return score_mod


def soft_window_bias(parameters, sizes):
    batch, _, q_index, kv_index = indices(sizes)
    distance = jnp.abs(np.float32(kv_index - q_index) + parameters["centre"][batch % 2])
    return -jnp.logaddexp(distance - parameters["width"], 0.0) + jnp.zeros(sizes)


def documents(parameters, sizes):
    ids = parameters["ids"]
    return Mask.from_function(lambda batch, head, q_index, kv_index: ids[batch, q_index] == ids[batch, kv_index])


def same_document(parameters, sizes):
    batch, _, q_index, kv_index = indices(sizes)
    return parameters["ids"][batch, q_index] == parameters["ids"][batch, kv_index]


WIDTH = 6


def neighbourhood(parameters, sizes):
    """Of a picture `WIDTH` wide, without the last column of it for odd heads."""

    def near(batch, head, q_index, kv_index):
        rows = kv_index // WIDTH - q_index // WIDTH
        columns = kv_index % WIDTH - q_index % WIDTH
        return (abs(rows) <= 1) & (abs(columns) <= 1) & ((head % 2 == 0) | (kv_index % WIDTH < WIDTH - 1))

    return Mask.from_function(near)


def is_near(parameters, sizes):
    _, head, q_index, kv_index = indices(sizes)
    rows, columns = kv_index // WIDTH - q_index // WIDTH, kv_index % WIDTH - q_index % WIDTH
    return (abs(rows) <= 1) & (abs(columns) <= 1) & ((head % 2 == 0) | (kv_index % WIDTH < WIDTH - 1))


def dilated(parameters, sizes):
    """Through negative numbers, and with the key hidden by its score."""

    def score_mod(score, batch, head, q_index, kv_index):
        return jnp.where((q_index - kv_index) // 2 % 3 == 1, -jnp.inf, score)

    return score_mod


def is_shown(parameters, sizes):
    _, _, q_index, kv_index = indices(sizes)
    return (q_index - kv_index) // 2 % 3 != 1


VARIANTS = {
    "alibi": Variant(
        lambda generator, sizes: dict(slopes=generator.normal(size=sizes[1]).astype(np.float32) / 4),
        alibi,
        bias=alibi_bias,
    ),
    "relative": Variant(
        lambda generator, sizes: dict(table=generator.normal(size=(sizes[1], 15)).astype(np.float16)),
        relative,
        lambda parameters, sizes: eqx_attn.Causal("bottom_right"),
        bias=relative_bias,
    ),
    "softcap": Variant(score_mod=hand_written_softcap, softcap=2.0),
    "temperature": Variant(
        lambda generator, sizes: dict(log_scale=np.log(2) * np.resize([1, -1, 0], sizes[1]).astype(np.float32)),
        temperature,
        lambda parameters, sizes: eqx_attn.SlidingWindow(9, 6),
        temperature="log_scale",
    ),
    "soft window": Variant(
        lambda generator, sizes: dict(width=np.float32(4.5), centre=np.float32([1, -2.5])),
        soft_window,
        bias=soft_window_bias,
    ),
    "documents": Variant(
        lambda generator, sizes: dict(ids=np.sort(generator.integers(0, 4, (sizes[0], max(sizes[2:]))))),
        mask=lambda parameters, sizes: documents(parameters, sizes) & eqx_attn.Causal(),
        seen=lambda parameters, sizes: np.tri(*sizes[2:], dtype=bool) & same_document(parameters, sizes),
    ),
    "neighbourhood": Variant(mask=neighbourhood, seen=is_near),
    "dilated": Variant(score_mod=dilated, seen=is_shown),
}


def expected(variant: Variant, inputs: oracle.Inputs, parameters: dict[str, Any]) -> dict[str, tuple]:
    """The law's results, and the gradients of the parameters by their names."""
    sizes = oracle.score_shape(inputs)
    sizes = (int(np.prod(sizes[:-3])), *sizes[-3:])
    mask: Any = variant.mask(parameters, sizes)
    if variant.seen is not None:
        mask = np.broadcast_to(variant.seen(parameters, sizes), sizes)
    if variant.temperature:
        return _scaled(variant, inputs, mask, parameters)
    bias = pull_back = None
    learned = {name: jnp.asarray(x) for name, x in parameters.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    if variant.bias is not None:
        bias, pull_back = jax.vjp(lambda learned: variant.bias(parameters | learned, sizes), learned)
        jacobian = jax.jit(jax.jacfwd(lambda learned: variant.bias(parameters | learned, sizes)))(learned)
    wanted = oracle.expected(inputs, mask, extras=oracle.Extras(bias, softcap=variant.softcap))
    del wanted["max_logit"]
    if pull_back is None:
        return wanted
    dbias, allowed = wanted.pop("dbias")
    for name, x in learned.items():
        # Elements of the bias bring their errors in quadrature; a sum of n of them n roundings of partial sums.
        rows = np.asarray(jacobian[name], np.float64).reshape(dbias.size, -1)
        value, count = dbias.reshape(-1) @ rows, (rows != 0).sum(0)
        error = np.sqrt(allowed.reshape(-1) ** 2 @ rows**2)
        error = error + 4e-7 * np.sqrt(count) * np.sqrt(dbias.reshape(-1) ** 2 @ rows**2)
        error = error + float(jnp.finfo(x.dtype).eps) * abs(value)
        wanted[f"d{name}"] = value.reshape(x.shape), error.reshape(x.shape)
    return wanted


def _scaled(variant: Variant, inputs: oracle.Inputs, mask, parameters):
    """A head's scores times a number: as if its queries were."""
    axis = -2 if inputs.layout == "bshd" else -3
    factor = np.exp2(np.round(parameters[variant.temperature].astype(np.float64) / np.log(2)))
    factor = factor.reshape(-1, *(1,) * (-1 - axis))
    query = np.asarray(inputs.query, np.float64)  # times powers of two, so that nothing is rounded
    wanted = oracle.expected(dataclasses.replace(inputs, query=(query * factor).astype(inputs.query.dtype)), mask)
    del wanted["max_logit"]
    dq, allowed = wanted["dq"]
    wanted["dq"] = dq * factor, allowed * factor
    others = tuple(i for i in range(query.ndim) if i != query.ndim + axis)
    parts = dq * query * factor
    error = np.sqrt(((allowed * query * factor) ** 2).sum(others)) + 4e-7 * np.sqrt((parts**2).sum(others) * parts.size)
    wanted[f"d{variant.temperature}"] = parts.sum(others), error
    return wanted


def results(variant: Variant, inputs: oracle.Inputs, parameters: dict[str, Any], **options) -> dict[str, np.ndarray]:
    """What `attention` gives, and all gradients. The parameters are traced."""
    sizes = oracle.score_shape(inputs)
    integers = {name: x for name, x in parameters.items() if not jnp.issubdtype(x.dtype, jnp.floating)}
    learned = {name: jnp.asarray(x) for name, x in parameters.items() if name not in integers}

    @oracle.jit
    def run(arrays, learned, integers, cotangents):
        def call(arrays, learned):
            every = learned | integers
            score_mod = variant.score_mod and variant.score_mod(every, sizes)
            mask = variant.mask(every, sizes)
            result = eqx_attn.attention(
                *arrays, mask=mask, score_mod=score_mod, layout=inputs.layout, return_lse=True, **options
            )
            return result.out, result.lse

        primal, pull_back = jax.vjp(call, arrays, learned)
        return primal, pull_back(cotangents)

    (out, lse), (grads, others) = run(
        inputs.arrays, learned, jax.tree.map(jnp.asarray, integers), (inputs.dout, inputs.dlse)
    )
    assert {name: x.dtype for name, x in others.items()} == {name: x.dtype for name, x in learned.items()}
    found = dict(zip(oracle.NAMES, (out, lse, *grads), strict=True)) | {f"d{name}": x for name, x in others.items()}
    return {name: np.asarray(x, np.float64) for name, x in found.items()}


def check(name: str, inputs: oracle.Inputs, implementations: tuple[str, ...]):
    """One variant against its law."""
    variant, sizes = VARIANTS[name], oracle.score_shape(inputs)
    parameters = variant.parameters(np.random.default_rng(0), sizes)
    wanted = expected(variant, inputs, parameters)
    for implementation in implementations:
        given = parameters
        if implementation == "reference":  # JAX itself sums the gradients, in the dtype of the array
            given = {n: np.float32(x) if x.dtype == np.float16 else x for n, x in parameters.items()}
        found = results(variant, inputs, given, implementation=implementation)
        assert found.keys() == wanted.keys()
        oracle.assert_matches(found, wanted, wanted)
