"""JAX's transformations of calls with options: bias, sinks, softcap, dropout, segments and a map of blocks at once."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.ad_checkpoint import checkpoint_policies
from test_transforms import assert_same, axes_name, kernel_calls

from eqx_attn import attention, BlockSparse, Causal, Dropout, Segments

N, SEQ, HEADS, DIM = 3, 6, 2, 8
LEARNED = ("query", "key", "value", "bias", "sinks")


def operands(leading=()):
    """Arguments of `result`, each with the leading axes."""
    generator = np.random.default_rng(len(leading))
    normal = lambda *shape: jnp.asarray(generator.normal(size=(*leading, *shape)), jnp.float32)
    return dict(
        query=normal(SEQ, HEADS, DIM),
        key=normal(SEQ, 1, DIM),
        value=normal(SEQ, 1, DIM),
        bias=normal(HEADS, SEQ, SEQ),
        sinks=normal(HEADS),
        seed=jnp.asarray(generator.integers(0, 2**32, (*leading, 2)), jnp.uint32),
        ids=jnp.asarray(generator.integers(0, 3, (*leading, SEQ)), jnp.int32),
        blocks=jnp.asarray(generator.random((*leading, HEADS, 2, 3)) < 0.7),
    )


def result(given, **options):
    mask = Segments(given["ids"]) & Causal() & BlockSparse(given["blocks"], (3, 2))
    dropout = Dropout(0.3, jax.random.wrap_key_data(given["seed"]))
    learned = {name: given[name] for name in LEARNED}
    return attention(**learned, mask=mask, dropout=dropout, softcap=2.0, return_lse=True, **options)


def loss(learned, others, weights):
    out, lse, _ = result(learned | others)
    return jnp.sum((out * weights).astype(lse.dtype)) + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0) ** 2)


def split(given):
    return {name: given[name] for name in LEARNED}, {name: given[name] for name in given if name not in LEARNED}


WEIGHTS = jnp.asarray(np.random.default_rng(9).normal(size=(SEQ, HEADS, DIM)), jnp.float32)


def gradient(given, weights=WEIGHTS):
    return jax.value_and_grad(loss)(*split(given), weights)


one = oracle.jit(gradient)


def mapped(in_axes):
    """Arguments of which those with an axis have the mapped one there."""
    plain, full = operands(), operands((N,))
    return {name: plain[name] if axis is None else jnp.moveaxis(full[name], 0, axis) for name, axis in in_axes.items()}


def loop(function, in_axes, given):
    """What jax.vmap stands for."""
    rows = [
        function({name: x if in_axes[name] is None else jnp.take(x, i, in_axes[name]) for name, x in given.items()})
        for i in range(N)
    ]
    return jax.tree.map(lambda *row: jnp.stack(row), *rows)


NAMES = tuple(operands())
NOTHING = dict.fromkeys(NAMES)
AXES = [
    *(NOTHING | {name: 0} for name in ("bias", "sinks", "seed", "ids", "blocks")),
    NOTHING | dict(query=1, key=0, value=2),
    dict(query=1, key=2, value=-1, bias=2, sinks=1, seed=1, ids=1, blocks=1),
]


@pytest.mark.parametrize(
    "in_axes", AXES, ids=lambda axes: axes_name(f"{n}{a}" for n, a in axes.items() if a is not None)
)
def test_vmap_of_the_gradient(in_axes):
    """Also of what is not mapped: one gradient for each example. The cotangent, `WEIGHTS`, is not batched."""
    given = mapped(in_axes)
    assert_same(oracle.jit(jax.vmap(gradient, (in_axes,)))(given), loop(one, in_axes, given))


def test_nested_vmap():
    inner = NOTHING | dict(query=0, key=1, sinks=0, ids=0)
    outer = NOTHING | dict(query=0, bias=1, seed=0, blocks=0)
    given, full = mapped(inner), operands((N,))
    given |= {name: jnp.moveaxis(full[name], 0, outer[name]) for name in ("bias", "seed", "blocks")}
    given["query"] = jnp.stack([given["query"], 2 * given["query"], -given["query"]])
    found = oracle.jit(jax.vmap(jax.vmap(gradient, (inner,)), (outer,)))(given)
    assert_same(found, loop(lambda row: loop(one, inner, row), outer, given))


def test_gradient_of_a_vmap():
    """What all examples share has the sum of their gradients."""
    in_axes = NOTHING | dict(query=0, seed=0, ids=0)
    given = mapped(in_axes)
    learned, others = split(given)
    axes = tuple({name: in_axes[name] for name in half} for half in (learned, others))
    found = oracle.jit(jax.grad(lambda x: jnp.sum(jax.vmap(loss, (*axes, None))(x, others, WEIGHTS))))(learned)
    _, grads = loop(one, in_axes, given)
    assert_same(found, {name: grads[name] if axes[0][name] == 0 else grads[name].sum(0) for name in grads})


def test_jacrev():
    """Only the cotangent is batched."""
    learned, others = split(operands())

    @oracle.jit
    def rows(bias, sinks):
        out, pull_back = jax.vjp(
            lambda *x: result(learned | others | dict(zip(("bias", "sinks"), x, strict=True))).out, bias, sinks
        )
        basis = jnp.eye(out.size, dtype=out.dtype).reshape(out.size, *out.shape)
        return jax.lax.map(pull_back, basis)

    jacobian = jax.jacrev(
        lambda *x: result(learned | others | dict(zip(("bias", "sinks"), x, strict=True))).out, (0, 1)
    )
    found, wanted = (function(learned["bias"], learned["sinks"]) for function in (oracle.jit(jacobian), rows))
    assert_same(found, [row.reshape(SEQ, HEADS, DIM, *row.shape[1:]) for row in wanted])


@pytest.mark.parametrize(
    "names, calls", [((), 3), (("eqx_attn_out", "eqx_attn_lse"), 2)], ids=["nothing", "out and lse"]
)
def test_checkpoint(names, calls):
    """With both residuals saved the forward kernel runs once, whatever the options."""
    given = operands()
    learned, others = split(given)
    layer = lambda learned: result(learned | others, return_max_logit=True)
    saving = jax.checkpoint(layer, policy=checkpoint_policies.save_only_these_names(*names))

    def total(layer, learned):
        out, lse, max_logit = layer(learned)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0)) + jnp.sum(max_logit)

    assert kernel_calls(jax.grad(lambda x: total(saving, x)), learned) == calls
    if names:
        found, wanted = (oracle.jit(jax.grad(lambda x, f=f: total(f, x)))(learned) for f in (saving, layer))
        assert_same(found, wanted)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_x64(dtype):
    """x64 mode changes no result and no dtype; float64 inputs have float64 results."""
    plain = one(operands())[1] if dtype == "float32" else None
    with jax.enable_x64(True):
        learned, others = split(operands())
        learned |= {name: learned[name].astype(dtype) for name in ("query", "key", "value")}
        wide = "float64" if dtype == "float64" else "float32"
        found = jax.eval_shape(lambda x: result(x, return_max_logit=True), learned | others)
        assert (found.out.dtype, found.lse.dtype, found.max_logit.dtype) == (dtype, wide, wide)
        weights = WEIGHTS.astype(dtype)
        grads = oracle.jit(jax.grad(loss))(learned, others, weights)
        assert {name: grad.dtype for name, grad in grads.items()} == {name: x.dtype for name, x in learned.items()}
    if plain is not None:
        assert_same(grads, plain)


def test_donation():
    given = operands()
    wanted = one(given)[1]
    step = jax.jit(lambda learned, others: jax.grad(loss)(learned, others, WEIGHTS), donate_argnums=0)
    learned, others = split(jax.tree.map(jnp.copy, given))
    assert_same(step(learned, others), wanted)
    assert all(x.is_deleted() for x in learned.values())
