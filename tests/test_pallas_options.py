"""The options of TPU kernels, interpreted, against the law in NumPy: every result and every gradient."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from calls import kept_by
from jax._src.pallas.mosaic.interpret import interpret_pallas_call

import eqx_attn
from eqx_attn import BlockSparse, Causal, Dropout, Full, Segments
from eqx_attn._operands import Tile, Tiles
from eqx_attn._serve import Options, serve, Sizes


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several blocks even of short sequences."""
    tiles = Tiles(Tile(128, 128), Tile(128, 128), Tile(128, 128))
    monkeypatch.setattr(eqx_attn._tuning, "pallas_tpu_tiles", lambda *_: tiles)


@dataclasses.dataclass(frozen=True)
class Problem:
    """One call: separate arrays in bshd, random cotangents, the options."""

    layout: str
    sizes: Sizes
    arrays: tuple[jax.Array, ...]
    dout: jax.Array
    dlse: jax.Array
    options: Options

    def in_layout(self, x):
        return x.swapaxes(1, 2) if self.layout == "bhsd" else x

    @property
    def given(self) -> tuple[jax.Array, ...]:
        q, k, v = self.arrays
        if self.layout == "qkv":
            return (jnp.concatenate([q, k, v], axis=2),)
        if self.layout == "kv":
            return q, jnp.concatenate([k, v], axis=2)
        return tuple(map(self.in_layout, (q, k, v)))


def problem(
    q_seq,
    kv_seq,
    dim=16,
    *,
    v_dim=None,
    heads=(2, 1),
    batch=2,
    layout="bshd",
    dtype="float32",
    seed=0,
    mask=None,
    **options,
) -> Problem:
    generator = np.random.default_rng(seed)

    def array(*shape, mean=0.0):
        return jnp.asarray(generator.normal(mean, size=shape).astype(jnp.dtype(dtype)))

    q_heads, kv_heads = heads
    v_dim = v_dim or dim
    return Problem(
        layout,
        Sizes((batch,), q_seq, kv_seq, q_heads, kv_heads, dim, v_dim, dtype),
        (
            array(batch, q_seq, q_heads, dim),
            array(batch, kv_seq, kv_heads, dim),
            array(batch, kv_seq, kv_heads, v_dim, mean=0.5),
        ),
        array(batch, q_seq, q_heads, v_dim),
        jnp.asarray(generator.normal(size=(batch, q_heads, q_seq)).astype("float32")),
        Options(Full() if mask is None else mask, **options),
    )


def law(case: Problem) -> dict[str, np.ndarray]:
    """What `results` gives, of NumPy's oracle."""
    options = case.options
    inputs = oracle.Inputs(*case.arrays, case.dout, case.dlse, "bshd")
    dropout = {}
    if options.dropout is not None:
        dropout = dict(kept=kept_by(options.dropout, oracle.score_shape(inputs)), rate=options.dropout.rate)
    extras = oracle.Extras(options.bias, options.sinks, options.softcap, **dropout)
    found = {name: value for name, (value, _) in oracle.expected(inputs, options.mask, extras=extras).items()}
    dq, dk, dv = (found.pop(name) for name in ("dq", "dk", "dv"))
    if case.layout == "qkv":
        grads = (np.concatenate([dq, dk, dv], axis=2),)
    elif case.layout == "kv":
        grads = dq, np.concatenate([dk, dv], axis=2)
    else:
        grads = map(case.in_layout, (dq, dk, dv))
    found |= {"out": case.in_layout(found["out"])} | {f"grad {i}": grad for i, grad in enumerate(grads)}
    if not options.return_max_logit:
        del found["max_logit"]
    return found


def results(case: Problem) -> dict[str, np.ndarray]:
    """Output, lse, largest score and the gradients of the arrays, the bias and the sinks."""
    learned = {name: x for name in ("bias", "sinks") if (x := getattr(case.options, name)) is not None}
    options = dataclasses.replace(case.options, implementation="pallas_tpu")

    @oracle.jit
    def run(arrays, learned, traced, cotangents):
        def call(arrays, learned):
            chosen = dataclasses.replace(options, **traced, **learned)
            return serve(arrays, case.sizes, case.layout, chosen)

        primal, pull_back = jax.vjp(call, arrays, learned)
        max_logit = None if primal.max_logit is None else jnp.zeros_like(primal.max_logit)
        return primal, pull_back(eqx_attn.AttentionOutput(*cotangents, max_logit))

    traced: dict[str, Any] = dict(mask=case.options.mask, dropout=case.options.dropout)
    primal, (grads, learned_grads) = run(case.given, learned, traced, (case.in_layout(case.dout), case.dlse))
    found = dict(
        out=primal.out, lse=primal.lse, max_logit=primal.max_logit, **{f"d{k}": v for k, v in learned_grads.items()}
    )
    found |= {f"grad {i}": grad for i, grad in enumerate(grads)}
    assert all(found[f"d{name}"].dtype == x.dtype for name, x in learned.items())
    return {name: np.asarray(x.astype(jnp.float32), np.float64) for name, x in found.items() if x is not None}


def check(case: Problem, soiled: Problem | None = None) -> dict[str, np.ndarray]:
    """Compares the kernels with the law in NumPy; they get `soiled`, where that is given, and it `case`."""
    with eqx_attn.interpret(), jax.default_matmul_precision("highest"):
        found = results(soiled or case)
    assert not interpret_pallas_call.races.races_found
    wanted = law(case)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].shape == value.shape, name
        dead = ~np.isfinite(value)
        np.testing.assert_array_equal(found[name][dead], value[dead], err_msg=name)
        error = np.abs(found[name][~dead] - value[~dead]).max(initial=0)
        limit = tolerance(case, name) * max(1.0, np.abs(value[~dead]).max(initial=0))
        assert error <= limit, f"{name} is off by {error:.2e}, allowed {limit:.2e}"
    return found


def tolerance(case: Problem, name: str) -> float:
    """Relative to the largest element: sums of up to `length` float32 terms, and two roundings to a smaller dtype.

    One rounding is that of the weights (or of their gradient) before a product, the other that of the result; the gradients
    of bias and sinks have that of the output, from which they are made. A softcap brings an absolute error of 2**-23 times
    its size into each score and so as much, relatively, into each weight.
    """
    sizes, options = case.sizes, case.options
    length = max(sizes.q_heads // sizes.kv_heads * sizes.q_seq, sizes.kv_seq)
    if name in ("dbias", "dsinks"):
        length = sizes.batch * sizes.q_heads * sizes.q_seq
    narrow = sizes.dtype == "bfloat16" and name not in ("lse", "max_logit")
    narrow |= name == "dbias" and options.bias.dtype == jnp.bfloat16
    halves = 2 if narrow else 0
    return halves * 2.0**-8 + (max(8.0, math.sqrt(length)) + (options.softcap or 0)) * 2.0**-23


def generator():
    return np.random.default_rng(7)


def normal(*shape, dtype="float32"):
    return jnp.asarray(generator().normal(size=shape).astype(jnp.dtype(dtype)))


def some(*shape, share=0.5):
    return jnp.asarray(generator().random(shape) < share)


IDS = jnp.asarray(np.repeat([[0, 1, 2, 3, 0], [1, 1, 2, 0, 4]], [28, 30, 32, 30, 10], axis=1))  # 130, padding is 0
SINKS = jnp.asarray([0.5, 80.0])  # the second one larger than any score
DROPOUT = Dropout(0.3, jax.random.key(3))


def hiding_bias():
    """Some keys hidden; query 5 sees none, and query 6 one that the lowest of all numbers does not hide."""
    bias = jnp.where(normal(1, 2, 130, 130) > 0.8, -jnp.inf, normal(1, 2, 130, 130))
    return bias.at[:, :, 5].set(-jnp.inf).at[:, :, 6, :3].set(jnp.finfo(jnp.float32).min)


def test_a_bias_that_hides_rows():
    check(problem(130, 130, mask=Causal(), bias=hiding_bias(), return_max_logit=True))


def test_a_bias_per_query_and_dropout():
    check(problem(130, 130, mask=Full(), bias=normal(2, 1, 130, 1), dropout=DROPOUT))


def test_packed_keys_and_values_in_bfloat16():
    mask = eqx_attn._masks.Dense(some(2, 1, 130, 150, share=0.7))
    check(problem(130, 150, 128, layout="kv", heads=(4, 2), dtype="bfloat16", mask=mask))


def test_a_map_of_small_blocks_for_each_head():
    check(problem(130, 130, mask=BlockSparse(some(2, 2, 7, 19), (20, 7)) & Causal(), layout="bhsd"))


def test_all_options_at_once():
    """With packed arrays that are read in place."""
    mask = Segments(IDS) & Causal() & BlockSparse(some(2, 2, 3, 3, share=0.7), 50)
    mask = mask & eqx_attn._masks.Dense(some(130, 1, share=0.9))
    options = dict(bias=normal(2, 130, 130, dtype="bfloat16"), sinks=SINKS, softcap=3.0, dropout=DROPOUT)
    check(problem(130, 130, 128, layout="qkv", mask=mask, return_max_logit=True, **options))


def test_what_padding_holds_reaches_nothing():
    """NaN and large numbers in padding, of arrays and of cotangents, reach no result."""
    options = dict(mask=Segments(IDS) & Causal(), sinks=SINKS, softcap=2.0, dropout=DROPOUT)
    clean = problem(130, 130, **options)
    padding = (IDS == 0)[:, :, None, None]
    garbage = lambda x, value: jnp.where(padding, value, x)
    q, k, v = clean.arrays
    soiled = dataclasses.replace(clean, arrays=(garbage(q, jnp.nan), garbage(k, jnp.nan), garbage(v, jnp.inf)))
    soiled = dataclasses.replace(soiled, dout=garbage(clean.dout, jnp.nan))
    found = check(clean, soiled)
    assert all((found[f"grad {i}"][np.asarray(IDS) == 0] == 0).all() for i in range(3))


def test_hidden_blocks_of_a_map_are_not_read():
    """NaN in keys and values of a block that nobody sees, and in the queries of one that sees nothing."""
    seen = jnp.asarray([[True, False, True], [False, False, False]])
    case = problem(256, 384, heads=(1, 1), batch=1, mask=BlockSparse(seen, 128))
    q, k, v = case.arrays
    soiled = dataclasses.replace(
        case, arrays=(q.at[:, 128:].set(jnp.nan), k.at[:, 128:256].set(jnp.nan), v.at[:, 128:256].set(jnp.nan))
    )
    check(case, soiled)
