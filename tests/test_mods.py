"""Score and mask functions: against the laws that they obey, transformed, on meshes, together with everything else."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import mods
import numpy as np
import oracle
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import eqx_attn
from eqx_attn import _tuning, attention, Causal, ContextParallel, Dropout, Mask, Segments
from eqx_attn._operands import Tile, Tiles

TILES = Tiles(Tile(16, 32), Tile(32, 16), Tile(16, 32))


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several blocks along both axes."""
    monkeypatch.setattr(_tuning, "_triton_tiles", lambda spec, dtype: TILES)
    for module in (eqx_attn._resolve, eqx_attn._vjp):
        monkeypatch.setattr(module, "XLA_TILE", Tile(16, 8))


@pytest.mark.parametrize("name", mods.VARIANTS)
def test_variant(name, random_key):
    """Outputs and all gradients, those of what the function closes over too."""
    pytest.importorskip("triton")
    layout = "bhsd" if name in ("alibi", "documents") else "bshd"
    inputs = oracle.random_inputs(random_key, 21, 37, heads=mods.HEADS, layout=layout)
    implementations = ("reference", "xla", "triton") if name in ("relative", "neighbourhood") else ("xla", "triton")
    with eqx_attn.interpret(), jax.default_matmul_precision("highest"):
        mods.check(name, inputs, implementations)


def every_feature(given, **options):
    """A call with everything that a score passes through: softcap, bias, a function, masks, dropout, sinks."""
    slopes, table, ids = given["slopes"], given["table"], given["ids"]

    def score_mod(score, batch, head, q_index, kv_index):
        position = table[q_index % 3, kv_index] + (batch * head).astype(jnp.float32)
        return jnp.where(kv_index == q_index, score, score * jnp.exp(slopes[head]) + position)

    mask = Causal() & Segments(given["segments"])
    mask = mask & Mask.from_function(lambda batch, head, q, k: (ids[q] == ids[k]) | (head % 2 == 0))
    return attention(
        *(given[name] for name in ("query", "key", "value")),
        mask=mask,
        score_mod=score_mod,
        bias=given["bias"],
        sinks=given["sinks"],
        softcap=2.0,
        dropout=Dropout(0.2, jax.random.key(1)),
        return_lse=True,
        **options,
    )


LEARNED = ("query", "key", "value", "bias", "sinks", "slopes", "table")


def arguments(batch=2, seq=16, heads=4, kv_heads=2, leading=()):
    generator = np.random.default_rng(len(leading))

    def normal(*shape):
        return jnp.asarray(generator.normal(size=(*leading, *shape)), jnp.float32)

    return dict(
        query=normal(batch, seq, heads, 16),
        key=normal(batch, seq, kv_heads, 16),
        value=normal(batch, seq, kv_heads, 16),
        bias=normal(1, heads, 1, seq),
        sinks=normal(heads),
        slopes=normal(heads) / 2,
        table=normal(3, seq),
        ids=jnp.asarray(generator.integers(0, 2, (*leading, seq)), jnp.int32),
        segments=jnp.asarray(np.sort(generator.integers(0, 3, (*leading, batch, seq)), -1), jnp.int32),
    )


def gradients(given, **options):
    """The outputs, and the gradient of a sum in which all of them count differently."""

    def loss(learned):
        out, lse, _ = every_feature(given | learned, **options)
        weights = jnp.sin(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
        lse = jnp.where(jnp.isfinite(lse), lse, 0)
        return jnp.sum(out * weights) + jnp.sum(lse * jnp.cos(lse)), (out, lse)

    return jax.value_and_grad(loss, has_aux=True)({name: given[name] for name in LEARNED})


def assert_same(found, wanted):
    """Sums of some hundred terms in another order: relative to the largest element, each result's own."""
    allowed = 40 * float(jnp.finfo(jnp.float32).eps)
    for (path, got), want in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(wanted), strict=True):
        got, want = np.asarray(got), np.asarray(want)
        np.testing.assert_allclose(got, want, rtol=0, atol=allowed * max(1, abs(want).max()), err_msg=str(path))


def test_with_every_other_feature():
    """The kernels against JAX's own derivative of the dense definition, and with gradients in a fixed order."""
    pytest.importorskip("triton")
    given = arguments()
    wanted = oracle.jit(lambda given: gradients(given, implementation="reference"))(given)
    with eqx_attn.interpret(), jax.default_matmul_precision("highest"):
        for options in (dict(implementation="xla"), dict(implementation="triton"), dict(deterministic=True)):
            assert_same(oracle.jit(lambda given, options=options: gradients(given, **options))(given), wanted)


def test_vmap():
    """What is closed over may be mapped as well as the arrays; examples count as in a loop."""
    axes = dict.fromkeys(arguments()) | dict(query=1, table=0, ids=1)
    plain, full = arguments(), arguments(leading=(3,))
    given = {n: plain[n] if axis is None else jnp.moveaxis(full[n], 0, axis) for n, axis in axes.items()}
    found = oracle.jit(jax.vmap(gradients, (axes,)))(given)
    one = oracle.jit(gradients)
    rows = [one({n: x if axes[n] is None else jnp.take(x, i, axes[n]) for n, x in given.items()}) for i in range(3)]
    assert_same(found, jax.tree.map(lambda *row: jnp.stack(row), *rows))


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices, simulated ones on a CPU")
@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=lambda kind: kind.name.lower())
def test_batch_and_heads_on_a_mesh(kind):
    """Indices count over the whole arrays; what functions close over may be sharded."""
    given = arguments(batch=4)
    wanted = oracle.jit(gradients)(given)
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(kind,) * 2)
    specs = dict.fromkeys(("query", "key", "value"), P("data", None, "tensor")) | dict(segments=P("data"))
    specs |= dict(slopes=P("tensor")) if kind == AxisType.Explicit else {}
    with jax.set_mesh(mesh):
        sharded = {n: jax.device_put(x, NamedSharding(mesh, specs.get(n, P()))) for n, x in given.items()}
        found = oracle.jit(gradients)(sharded)
    assert_same(jax.device_get(found), wanted)
    if kind == AxisType.Explicit:
        assert found[1]["slopes"].sharding.spec == P("tensor")


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices, simulated ones on a CPU")
@pytest.mark.parametrize(
    "strategy, order", [("ring", "striped"), ("all_gather", "dual_chunk"), ("all_to_all", "contiguous")]
)
def test_indices_are_those_of_the_original_order(strategy, order):
    devices, seq = 4, 24
    slopes, table = (jnp.asarray(np.random.default_rng(0).normal(size=n), jnp.float32) for n in (4, 2 * seq - 1))
    arrays = [arguments(seq=seq)[name] for name in ("query", "key", "value")]

    def run(arrays, slopes, table, **options):
        def loss(arrays, slopes, table):
            def score_mod(score, batch, head, q_index, kv_index):
                return score * slopes[head] + table[kv_index - q_index + seq - 1]

            mask = Causal() & Mask.from_function(lambda batch, head, q, k: (q - k) % 3 != 1)
            out = attention(*arrays, mask=mask, score_mod=score_mod, **options)
            return jnp.sum(out * out)

        return jax.value_and_grad(loss, (0, 1, 2))(arrays, slopes, table)

    wanted = oracle.jit(run)(arrays, slopes, table)
    mesh = jax.make_mesh((devices,), ("context",), axis_types=(AxisType.Explicit,))
    context = ContextParallel("context", strategy, order)
    with jax.set_mesh(mesh):
        places = context.order_on(mesh).positions(seq)
        dealt = [jax.device_put(x[:, places], NamedSharding(mesh, P(None, "context"))) for x in arrays]
        value, (grads, *others) = jax.device_get(oracle.jit(lambda *x: run(*x, context=context))(dealt, slopes, table))
    back = context.order_on(mesh).places(seq)
    assert_same((value, ([x[:, back] for x in grads], *others)), wanted)


def test_batch_axes_on_a_mesh():
    """Several of them, of which another than the first is sharded: examples count over all."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, 6, 2, 8)), jnp.float32)
    rank = jnp.arange(8.0)

    def run(x):
        score_mod = lambda score, batch, head, q, k: score + rank[batch] * (q - k).astype(jnp.float32)
        return attention(x, x, x, score_mod=score_mod)

    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    wanted = run(x)
    with jax.set_mesh(mesh):
        found = jax.jit(run)(jax.device_put(x, NamedSharding(mesh, P(None, "data"))))
    assert_same(jax.device_get(found), wanted)


def test_packed_and_ragged():
    given = arguments(batch=1, kv_heads=4)
    score_mod = lambda score, batch, head, q, k: score + (head * (q - k)).astype(jnp.float32)
    arrays = [given[name] for name in ("query", "key", "value")]
    wanted = attention(*arrays, score_mod=score_mod)
    packed = eqx_attn.attention_qkvpacked(jnp.stack(arrays, 2), score_mod=score_mod)
    ragged = eqx_attn.attention_ragged(*(x[0] for x in arrays), jnp.array([16]), score_mod=score_mod)
    assert_same((packed, ragged), (wanted, wanted[0]))


def test_a_module_as_mask_function():
    """A pytree with arrays crosses `jax.jit` as any mask does."""

    class Near(eqx.Module):
        width: jax.Array

        def __call__(self, batch, head, q, k):
            return abs(q - k) < self.width[head]

    arrays = [arguments()[name] for name in ("query", "key", "value")]
    near = Near(jnp.array([1, 3, 5, 7]))
    mask = Mask.from_function(near)
    found = jax.jit(lambda mask: attention(*arrays, mask=mask))(mask)
    distance = abs(np.arange(16)[:, None] - np.arange(16))
    assert_same(found, attention(*arrays, mask=jnp.asarray(distance < np.array([1, 3, 5, 7])[:, None, None])))


Q = jax.ShapeDtypeStruct((1, 8, 2, 16), jnp.float32)
slopes = jnp.ones(2)


def switched(score, batch, head, q_index, kv_index):
    return jax.lax.cond(q_index > kv_index, lambda: score, lambda: -score)


def summed(score, batch, head, q_index, kv_index):
    return score + jnp.sum(slopes * score)


def rounded(score, batch, head, q_index, kv_index):
    return jnp.round(score)


WRONG = {
    "cond": (switched, r"uses the primitive 'cond' \(.*test_mods.py:{line}:.*\(switched\)\).*write it with jnp.where"),
    "array": (
        summed,
        r"computes with an array of shape \(2,\) \(.*test_mods.py:{line}:.*compute such an array before the call",
    ),
    "inner": (rounded, r"uses the primitive 'round' \(.*test_mods.py:{line}:.*write jnp.floor"),
    "power": (lambda score, b, h, q, k: score**1.5, "may be negative to a power"),
    "shape": (lambda score, b, h, q, k: score + slopes, r"returns float32\[2\]: .* returns one floating number"),
    "integer": (lambda score, b, h, q, k: q, r"score_mod returns int32\[\]: .* returns one floating number"),
    "no function": (3, "score_mod is a int: give a function"),
}


@pytest.mark.parametrize("function, message", WRONG.values(), ids=WRONG)
def test_what_cannot_be_printed_is_refused_with_its_line(function, message):
    line = function.__code__.co_firstlineno + 1 if hasattr(function, "__code__") else 0
    with pytest.raises((ValueError, TypeError), match=re.compile(message.replace("{line}", str(line)), re.DOTALL)):
        jax.eval_shape(lambda x: attention(x, x, x, score_mod=function), Q)


def test_the_reference_takes_any_function():
    jax.eval_shape(lambda x: attention(x, x, x, score_mod=switched, implementation="reference"), Q)


def test_a_mask_function_returns_a_boolean():
    mask = Mask.from_function(lambda batch, head, q, k: q - k)
    with pytest.raises(TypeError, match=r"Mask.from_function's function returns int32\[\]: .* returns one boolean"):
        jax.eval_shape(lambda x: attention(x, x, x, mask=mask), Q)
    with pytest.raises(TypeError, match="Mask.from_function is a int: give a function"):
        Mask.from_function(3)


def test_explain_shows_the_lines():
    near = Mask.from_function(lambda batch, head, q, k: abs(q - k) < 3)
    report = eqx_attn.explain(Q, Q, Q, score_mod=lambda s, b, h, q, k: s * slopes[h], mask=near, device="sm_90a")
    assert re.fullmatch(r"triton/bshd_full_qk16_v16_scoremod[0-9a-f]{12}_maskmod[0-9a-f]{12}", report.kernel)
    assert report.functions == {
        "score_mod": ("slope = tl.load(slopes_at + h)", "scores = scores * slope"),
        "mask": ("keep = tl.abs(q - k) < 3",),
    }
    assert str(report).endswith("mask              keep = tl.abs(q - k) < 3")
