"""Calls with a context as programs: what moves between devices, when, how they transform, and what is refused."""

import collections
import math
import re

import contexts
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import eqx_attn
from eqx_attn import _tuning, attention, Causal, ContextParallel, Dropout, Segments, SlidingWindow
from eqx_attn._operands import Tile, Tiles
from eqx_attn.sharding import positions, reorder, restore

SEQ = 24
EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto


def mesh_and_arrays(splits, kind=EXPLICIT, batch=2, heads=(4, 2), dtype="float32", seq=SEQ):
    """A mesh, and query, key and value on it, batch over "data" and tokens over "context"."""
    mesh = contexts.mesh_of(splits, kind)
    inputs = oracle.random_inputs(jax.random.key(0), seq, seq, heads=heads, batch=(batch,), dtype=dtype)
    spec = P("data" if "data" in splits else None, "context")
    return mesh, tuple(jax.device_put(x, NamedSharding(mesh, spec)) for x in inputs.arrays)


def step(context, mask, **options):
    """Output and gradients of a call whose cotangent is no constant."""

    def run(*arrays):
        out, pull_back = jax.vjp(
            lambda *x: attention(*x, mask=mask, context=context, implementation="xla", **options), *arrays
        )
        return out, pull_back(jnp.sin(out))

    return run


def collectives(mesh, function, *arguments):
    """Of each kind in the compiled program, the bytes of what each one gives to a device, in ascending order."""
    with jax.set_mesh(mesh):
        text = jax.jit(function).lower(*arguments).compile().as_text()
    found = collections.defaultdict(list)
    for results, kind in re.findall(r" = (.+?) (all-\w+(?:-\w+)?|reduce-scatter|collective-permute)\(", text):
        shapes = re.findall(r"(\w+)\[([\d,]*)\]", results)
        found[kind].append(
            sum(_BYTES[of] * math.prod(map(int, filter(None, sizes.split(",")))) for of, sizes in shapes)
        )
    return {kind: sorted(sizes) for kind, sizes in found.items()}


_BYTES = dict(pred=1, s32=4, f16=2, f32=4)


# On each of 2 x 3 devices: 2 examples of 8 tokens, 6 query heads (ROWS of them) and 3 key heads (KEYS) of 16 channels.
ROWS = 2 * 8 * 6
QUERY, KEYS = ROWS * 16, 2 * 8 * 3 * 16
# K and V move n-1 times in each direction; dk and dv once for each hop, in float32.
RING = [2 * KEYS] * (2 * 2 + 2 * 2) + [4 * KEYS] * (2 * 3)
GATHER = {"all-gather": [3 * 2 * KEYS] * 4, "reduce-scatter": [4 * KEYS] * 2}
EXCHANGE = {
    # Query, key, value and the results; out, lse and their cotangents (query, key and value are kept), and gradients.
    "all-to-all": sorted(
        [2 * QUERY, 2 * KEYS, 2 * KEYS, 2 * QUERY, 4 * ROWS]
        + [2 * QUERY, 4 * ROWS, 2 * QUERY, 4 * ROWS]
        + [2 * QUERY, 2 * KEYS, 2 * KEYS]
    )
}


@pytest.mark.parametrize(
    "how, mask, wanted",
    [
        ("ring contiguous", Causal(), {"collective-permute": RING}),
        ("ring contiguous", SlidingWindow(3, 0), {"collective-permute": [2 * KEYS] * 4 + [4 * KEYS] * 4}),
        ("ring contiguous", Causal() & Segments(np.ones((4, SEQ), int)), {"collective-permute": RING}),
        ("all_gather dual_chunk", Causal(), GATHER),
        ("all_gather striped", Causal(), GATHER),
        ("all_to_all contiguous", Causal(), EXCHANGE),
    ],
)
@pytest.mark.parametrize("kind", [EXPLICIT, AUTO])
def test_collectives(how, mask, wanted, kind):
    strategy, order = how.split()
    # The CPU's compiler would make collectives of bfloat16 ones of float32.
    mesh, arrays = mesh_and_arrays(dict(data=2, context=3), kind, batch=4, heads=(6, 3), dtype="float16")
    found = collectives(mesh, step(ContextParallel("context", strategy, order), mask), *arrays)
    if kind == AUTO and mask not in (Causal(), SlidingWindow(3, 0)):
        found.pop("all-gather", None)  # of ids, a few bytes a token
    if kind == AUTO and strategy == "all_to_all":
        for again in (2 * QUERY, 2 * KEYS, 2 * KEYS):  # query, key and value once more in the backward
            found["all-to-all"].remove(again)
    assert found == wanted


def test_keys_are_sent_before_the_kernel_that_hides_it():
    """In the traced program: the permute of the next hop is before the loop of this one, and none follows the last."""
    mesh, arrays = mesh_and_arrays(dict(context=3))
    with jax.set_mesh(mesh):
        traced = str(
            jax.make_jaxpr(lambda *x: attention(*x, context=ContextParallel("context"), implementation="xla"))(*arrays)
        )
    assert re.findall(r"(ppermute|scan)\[", traced) == ["ppermute", "ppermute", "scan"] * 2 + ["scan"]


def test_compiles_for_tpu():
    topologies = pytest.importorskip("jax.experimental.topologies")
    pytest.importorskip("libtpu")
    for name, device in (("v6e:4x4", "v6e"), ("tpu7x:2x2x1", "7x")):
        topology = topologies.get_topology_desc(platform="tpu", topology_name=name)
        devices = np.array(topology.devices).reshape(-1, 2)
        mesh = jax.sharding.Mesh(devices, ("data", "context"), axis_types=(EXPLICIT,) * 2)
        sharding = NamedSharding(mesh, P("data", "context"))
        query = jax.ShapeDtypeStruct((len(devices), 4096, 2, 128), jnp.bfloat16, sharding=sharding)

        def forward(query, device=device):
            with eqx_attn.target(device):
                return attention(
                    query, query, query, mask="causal", context=ContextParallel("context", "ring", "dual_chunk")
                )

        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            compiled = jax.jit(forward).trace(query).lower(lowering_platforms=("tpu",)).compile()
        entry = compiled.as_text().split("\nENTRY")[1]
        order = re.findall(r"collective-permute-start\(|collective-permute-done\(|tpu_custom_call", entry)
        # Key and value are on their way while the first kernel runs.
        first, second = (i for i, name in enumerate(order) if name == "tpu_custom_call")
        assert order[:first].count("collective-permute-start(") == 2
        assert order[first:second].count("collective-permute-done(") == 2


def test_lowers_for_cuda():
    pytest.importorskip("triton")
    mesh, arrays = mesh_and_arrays(dict(data=2, context=2), dtype="bfloat16", seq=256)
    context = ContextParallel("context", "ring", "striped")

    def loss(*x):
        return jnp.sum(jnp.sin(attention(*x, mask="causal", context=context)).astype(jnp.float32))

    with eqx_attn.target("sm_90a"), jax.set_mesh(mesh):
        text = jax.jit(jax.grad(loss, (0, 1, 2))).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("triton_kernel_call_ffi") >= 2 * 3


def test_interpreted_triton(random_key, monkeypatch):
    pytest.importorskip("triton")
    tiles = Tiles(Tile(16, 16), Tile(16, 16), Tile(16, 16))
    monkeypatch.setattr(_tuning, "_triton_tiles", lambda spec, dtype: tiles)
    inputs = oracle.random_inputs(random_key, 48, 48, batch=(1,))
    ids = np.repeat([[1, 2, 0]], [20, 21, 7], axis=1)
    mesh = contexts.mesh_of(dict(context=2), EXPLICIT)
    with eqx_attn.interpret(), jax.default_matmul_precision("highest"):
        contexts.check(
            mesh,
            ContextParallel("context", "ring", "dual_chunk"),
            inputs,
            Causal() & Segments(ids),
            oracle.Extras(sinks=jnp.array([0.5, -1.0, 0.0, 2.0])),
            implementation="triton",
        )


def equal(found, wanted, atol=1e-5):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=atol)


def test_transforms():
    """vmap over one example at a time, scan over layers, and checkpoint: as without a context."""
    mesh, arrays = mesh_and_arrays(dict(data=2, context=2))

    def losses(context):
        @jax.checkpoint
        def one(query, key, value):
            def layer(query, _):
                return attention(query, key, value, mask="causal", context=context, implementation="xla"), None

            return jnp.sum(jnp.sin(jax.lax.scan(layer, query, None, length=2)[0]))

        return lambda *x: jnp.sum(jax.vmap(one)(*x))

    wanted = jax.jit(jax.value_and_grad(losses(None), (0, 1, 2)))(*map(np.asarray, arrays))
    with jax.set_mesh(mesh):
        equal(jax.jit(jax.value_and_grad(losses(ContextParallel("context")), (0, 1, 2)))(*arrays), wanted, 2e-5)


def test_a_consumer_that_permutes_and_reshards():
    mesh, arrays = mesh_and_arrays(dict(data=2, context=2), AUTO)
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(4, SEQ, 16, 2)), jnp.float32)

    def loss(context):
        def run(*x):
            out = attention(*x, mask="causal", context=context, implementation="xla").transpose(2, 1, 3, 0)
            if context is not None:
                out = jax.lax.with_sharding_constraint(out, P("context", None, None, "data"))
            return jnp.sum(out * weights)

        return run

    wanted = jax.jit(jax.value_and_grad(loss(None), (0, 1, 2)))(*map(np.asarray, arrays))
    with jax.set_mesh(mesh):
        equal(jax.jit(jax.value_and_grad(loss(ContextParallel("context")), (0, 1, 2)))(*arrays), wanted, 2e-5)


def test_dropout_has_the_same_bits():
    """The weights that are dropped: keys of unit vectors make the output those weights."""
    mesh = contexts.mesh_of(dict(data=2, context=2), EXPLICIT)
    query = jnp.zeros((2, 16, 2, 16))
    value = jnp.broadcast_to(jnp.eye(16)[None, :, None], (2, 16, 2, 16))
    dropout = Dropout(0.4, jax.random.key(3))
    wanted = jax.jit(lambda *x: attention(*x, dropout=dropout) > 0)(query, query, value)
    context = ContextParallel("context", "ring", "dual_chunk")
    places = positions(context, 16, 2)
    put = lambda x: jax.device_put(x[:, places], NamedSharding(mesh, P("data", "context")))
    with jax.set_mesh(mesh):
        found = jax.jit(lambda *x: attention(*x, dropout=dropout, context=context))(put(query), put(query), put(value))
    assert (np.asarray(found)[:, np.argsort(places)] > 0).tolist() == np.asarray(wanted).tolist()


def test_layer_with_rotary_positions_of_the_order():
    mesh = contexts.mesh_of(dict(data=2, context=2), EXPLICIT)
    context = ContextParallel("context", "ring", "dual_chunk")
    places = positions(context, SEQ, 2)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, SEQ, 32)), jnp.float32)
    ids = np.random.default_rng(1).integers(0, 3, (2, SEQ))

    def outputs(context, x, ids):
        layer = eqx_attn.nn.MultiheadAttention(
            2, 32, rotary=eqx_attn.nn.RotaryEmbedding(16), context=context, implementation="xla", key=jax.random.key(0)
        )

        def loss(layer, x):
            out = jax.vmap(lambda x, ids: layer(x, x, x, mask=Causal() & Segments(ids)))(x, ids)
            return jnp.sum(jnp.sin(out)), out

        (_, out), grads = eqx.filter_jit(eqx.filter_value_and_grad(loss, has_aux=True))(layer, x)
        return np.asarray(out), eqx.filter(grads, eqx.is_inexact_array)

    out, grads = outputs(None, x, jnp.asarray(ids))
    put = lambda x: jax.device_put(x[:, places], NamedSharding(mesh, P("data", "context")))
    with jax.set_mesh(mesh):
        found, found_grads = outputs(context, put(x), put(ids))
    equal(found, out[:, places])
    equal(found_grads, grads, 1e-4)


@pytest.mark.parametrize("order, stripe", [("contiguous", 1), ("dual_chunk", 1), ("striped", 1), ("striped", 2)])
@pytest.mark.parametrize("devices", [3, 2])
@pytest.mark.parametrize("kind", [EXPLICIT, AUTO])
def test_reorder(order, stripe, devices, kind):
    seq = 4 * devices**2
    mesh = contexts.mesh_of(dict(context=devices), kind)
    x = jnp.arange(2 * seq * 3).reshape(2, seq, 3)
    context = ContextParallel("context", order=order, stripe=stripe)
    with jax.set_mesh(mesh):
        sharded = jax.device_put(x, NamedSharding(mesh, P(None, "context")))
        found = reorder(sharded, context, axis=1)
        np.testing.assert_array_equal(found, x[:, positions(context, seq)])
        np.testing.assert_array_equal(restore(found, context, axis=-2), x)
    moved = collectives(mesh, lambda x: reorder(x, context, axis=1), sharded)
    share = 2 * seq // devices * 3 * 4
    wanted = dict(contiguous={}, dual_chunk={"collective-permute": [share // 2] * 2}, striped={"all-to-all": [share]})
    assert moved == wanted[order]


def test_refusals():
    mesh, (query, key, value) = mesh_and_arrays(dict(data=2, context=4), batch=2)
    ring = ContextParallel("context")

    def refused(message, *arrays, context=ring, error=ValueError, **options):
        with pytest.raises(error, match=message):
            attention(*arrays, context=context, **options)

    host = jnp.zeros((2, SEQ, 4, 16))
    refused(r"no mesh here has an axis 'context'; use `with jax.set_mesh", host, host, host)
    with jax.set_mesh(mesh):
        refused("no mesh here has an axis 'ctx', only", query, key, value, context=ContextParallel("ctx"))
        refused("implementation='reference' with context", query, key, value, implementation="reference")
        refused(
            r"order='dual_chunk' over 4 devices deals multiples of 8 tokens, and there are 20: pad",
            *(jnp.zeros((2, 20, 4, 16)),) * 3,
            context=ContextParallel("context", order="dual_chunk"),
        )
        few = jnp.zeros((2, SEQ, 2, 16))
        refused(
            "each of the 4 devices of axis 'context' an equal number of heads, and there are 2 query heads: use strategy='ring'",
            *(few,) * 3,
            context=ContextParallel("context", "all_to_all"),
        )
        blocks = eqx_attn.BlockSparse(np.ones((6, 6), bool), 4)
        refused("BlockSparse has blocks of 4 queries.*keeps 6 neighbours together", query, key, value, mask=blocks)
        layer = eqx_attn.nn.MultiheadAttention(2, 32, context=ring, key=jax.random.key(0))
        with pytest.raises(ValueError, match="a cache holds one sequence in one place"):
            layer(*(jnp.zeros((1, 32)),) * 3, cache=eqx_attn.nn.KVCache.for_layer(layer, 8))

        def inside(query):
            return attention(query, query, query, context=ring)

        with pytest.raises(ValueError, match="axis 'context' is manual here"):
            jax.shard_map(inside, in_specs=P("data", "context"), out_specs=P("data", "context"))(query)
        with pytest.raises(ValueError, match=r"moves lengths that are multiples of 8, and axis 1 has 20"):
            reorder(jnp.zeros((2, 20)), ContextParallel("context", order="dual_chunk"), axis=1)
    both = jax.make_mesh((2, 4), ("data", "context"), axis_types=(AUTO, EXPLICIT))
    with jax.set_mesh(both):
        refused("a mesh of both explicit axes, context, and auto ones, data", host, host, host)
    for message, arguments in (
        ("strategy is 'rings': it is one of ring", dict(strategy="rings")),
        ("order is 'zigzag'", dict(order="zigzag")),
        ("stripe is 0", dict(order="striped", stripe=0)),
        ("stripes are order='striped'", dict(stripe=4)),
    ):
        with pytest.raises(ValueError, match=message):
            ContextParallel("context", **arguments)
