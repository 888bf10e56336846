"""Batch and heads over the devices of a mesh, of explicit and of auto axes: results, collectives, refusals."""

import dataclasses
import re

import calls
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import eqx_attn
from eqx_attn import _resolve
from eqx_attn.sharding._partition import aligned_cotangent

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices, simulated ones on a CPU")

KINDS = pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=lambda kind: kind.name.lower())
BATCH = ("data", "fsdp")
CAUSAL = eqx_attn.Causal()
DROPOUT = eqx_attn.Dropout(0.3, jax.random.key(1))
DENSE = np.random.default_rng(0).random((2, 1, 16, 16)) < 0.7
BLOCKS = eqx_attn.BlockSparse(np.random.default_rng(0).random((4, 4, 2)) < 0.7, (4, 8))
LENGTHS = eqx_attn.Segments.from_lengths(np.array([[5, 0, 9], [1, 2, 3]] * 4), 16)
IDS = np.array([[1] * 7 + [2] * 6 + [0] * 3, [3, 1, 1, 2] * 4] * 4, np.int32)


def mesh_of(kind, shape=(2, 2, 2), names=("data", "fsdp", "tensor")):
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names))


def put(mesh, x, spec):
    return None if x is None else jax.device_put(x, NamedSharding(mesh, spec))


def on(mesh, inputs, batch=(BATCH,), heads="tensor", kv_heads="tensor"):
    """The arrays of a call on a mesh, sharded along their batch axes and heads."""

    def spec(heads):
        return P(*batch, None, heads) if inputs.layout == "bshd" else P(*batch, heads)

    of = dict(query=spec(heads), key=spec(kv_heads), value=spec(kv_heads), dout=spec(heads), dlse=P(*batch, heads))
    return dataclasses.replace(inputs, **{name: put(mesh, getattr(inputs, name), spec) for name, spec in of.items()})


def case(name, *, heads=(4, 2), batch=(8,), on=None, marks=(), **options):
    return pytest.param(heads, batch, on or {}, options, id=name, marks=marks)


def _bias(shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(3), shape).astype(dtype)


@KINDS
@pytest.mark.parametrize(
    "heads, batch, placed, options",
    [
        case("kv_heads_whole", on=dict(kv_heads=None), bias=_bias((1, 4, 16, 16))),
        case("mqa", heads=(4, 1), on=dict(kv_heads=None), sinks=_bias((4,)), softcap=3.0, dropout=DROPOUT),
        case("groups_over_two_axes", heads=(8, 2), on=dict(batch=("data",), heads=("tensor", "fsdp"))),
        case(
            "groups_over_two_axes_kv_whole",
            heads=(8, 2),
            on=dict(batch=("data",), heads=("fsdp", "tensor"), kv_heads=None),
            bias=_bias((8, 1, 1)),
            marks=pytest.mark.smoke,
        ),
        case("two_batch_axes", batch=(4, 2), on=dict(batch=("data", "fsdp")), mask=DENSE, dropout=DROPOUT),
        case("second_batch_axis", batch=(3, 4), on=dict(batch=(None, BATCH)), bias=_bias((1, 4, 4, 16, 16))),
        case("no_batch", batch=(), on=dict(batch=()), mask=BLOCKS),  # XLA did not end: see _locations.py
        case("segments", mask=eqx_attn.SlidingWindow(5, 1, "bottom_right") & eqx_attn.Segments(IDS)),
        case("lengths", mask=LENGTHS & eqx_attn.Chunked(4) & eqx_attn.Dilated(2)),
        case("prefix", mask=eqx_attn.PrefixLM(np.arange(8)), bias=_bias((16, 16), jnp.bfloat16)),
        case("dense", mask=np.tile(DENSE, (4, 1, 1, 1)), bias=_bias((8, 1, 1, 16))),
    ],
)
def test_equals_the_oracle(random_key, kind, heads, batch, placed, options):
    """Outputs, lse, largest scores and every gradient; bias and sinks lie whole on each device, ids along the batch."""
    mesh = mesh_of(kind)
    mask, dropout = options.get("mask", CAUSAL), options.get("dropout")
    inputs = oracle.random_inputs(random_key, 16, 16, heads=heads, batch=batch)
    extras = oracle.Extras(**{name: options.get(name) for name in ("bias", "sinks", "softcap")})
    calls.check(on(mesh, inputs, **placed), mask, extras, dropout, implementation="xla")


def gradients(attend, *arrays):
    """Of all arrays but the last, which is the cotangent, after the output."""

    def run(*arrays):
        out, pull_back = jax.vjp(attend, *arrays[:-1])
        return out, *pull_back(arrays[-1])

    return run, arrays


def assert_like_one_device(attend, mesh, arrays, specs):
    """`gradients` on a mesh and on one device, which other tests compare with the oracle: equal but for rounding."""
    run, arrays = gradients(attend, *arrays)
    found = oracle.jit(run)(*(put(mesh, x, spec) for x, spec in zip(arrays, specs, strict=True)))
    for x, y in zip(oracle.jit(run)(*arrays), found, strict=True):
        # Each is a sum of 16 terms of products of 16: some roundings of float32, of the size of the largest.
        np.testing.assert_allclose(y, x, rtol=0, atol=32 * np.finfo(np.float32).eps * np.abs(x).max())


def plain(**options):
    return lambda q, k, v: eqx_attn.attention(q, k, v, **{"mask": CAUSAL, "implementation": "xla", **options})


def qkv(key, *batch, heads=(4, 2), q_seq=16, dims=(16, 16)):
    inputs = oracle.random_inputs(key, q_seq, q_seq, heads=heads, batch=batch, dims=dims)
    return *inputs.arrays, inputs.dout


SPEC = P(BATCH, None, "tensor")
TWO = P("data", "fsdp", None, "tensor")


@KINDS
@pytest.mark.parametrize(
    "transform, batch, spec",
    [
        pytest.param(lambda f: jax.vmap(f, 1, 1), (2, 4), TWO, id="vmap_of_axis_1"),
        pytest.param(lambda f: jax.vmap(jax.vmap(f)), (2, 4), P(None, BATCH, None, "tensor"), id="vmap_of_vmap"),
        pytest.param(
            lambda f: lambda q, k, v: lax.scan(lambda q, _: (jax.checkpoint(f)(q, k, v), None), q, None, length=2)[0],
            (8,),
            SPEC,
            id="scan_of_checkpoint",
        ),
    ],
)
def test_transformed(random_key, kind, transform, batch, spec):
    assert_like_one_device(transform(plain()), mesh_of(kind), qkv(random_key, *batch), [spec] * 4)


@pytest.mark.parametrize("kind, bias_axis", [(AxisType.Explicit, 0), (AxisType.Explicit, None), (AxisType.Auto, 0)])
def test_vmap_of_some(random_key, kind, bias_axis):
    """Keys are shared by all, and a bias by all or by those of one index."""
    q, k, v, dout = qkv(random_key, 2, 4)
    bias = _bias((1, 4, 16, 16) if bias_axis is None else (2, 1, 4, 16, 16))

    def attend(q, k, v, bias):
        one = lambda q, bias: plain(bias=bias)(q, k, v)
        return jax.vmap(one, in_axes=(0, bias_axis))(q, bias)

    key_spec = P("fsdp", None, "tensor")
    bias_spec = P(None, "tensor") if bias_axis is None else P("data", None, "tensor")
    assert_like_one_device(
        attend, mesh_of(kind), (q, k[0], v[0], bias, dout), [TWO, key_spec, key_spec, bias_spec, TWO]
    )


@KINDS
def test_outside_of_jit(random_key, kind):
    mesh = mesh_of(kind)
    *arrays, _ = qkv(random_key, 8)
    attend = plain(mask=CAUSAL & eqx_attn.Segments(IDS))
    with jax.set_mesh(mesh):
        found = attend(*(put(mesh, x, SPEC) for x in arrays))
    np.testing.assert_allclose(found, oracle.jit(attend)(*arrays), rtol=0, atol=1e-5)
    assert found.sharding.is_equivalent_to(NamedSharding(mesh, SPEC), 4)


@pytest.mark.parametrize(
    "kind, check_vma, manual, implementation",
    [
        pytest.param(AxisType.Explicit, True, None, "xla", marks=pytest.mark.smoke),
        (AxisType.Auto, False, None, "xla"),
        (AxisType.Auto, True, None, "reference"),
        (AxisType.Explicit, True, {"data"}, "xla"),
        (AxisType.Explicit, False, {"data"}, "xla"),
        (AxisType.Auto, True, {"data"}, "xla"),
    ],
)
def test_inside_shard_map(random_key, kind, check_vma, manual, implementation):
    """A user's own shard_map, over all axes or some; with check_vma JAX itself sums the gradient of what does not vary."""
    q, k, v, dout = qkv(random_key, 8)
    bias = _bias((1, 4, 16, 16))
    attend = lambda q, k, v, bias, ids: plain(
        bias=bias, mask=CAUSAL & eqx_attn.Segments(ids), implementation=implementation
    )(q, k, v)

    def run(q, k, v, bias, ids, dout, axes=None):
        out, pull_back = jax.vjp(lambda *x: attend(*x, ids), q, k, v, bias)
        *grads, dbias = pull_back(dout)
        return out, *grads, lax.psum(dbias, axes) if axes and not check_vma else dbias

    mesh = mesh_of(kind)
    specs = [SPEC, SPEC, SPEC, P(None, "tensor"), P(BATCH), SPEC]
    arguments = [put(mesh, x, spec) for x, spec in zip((q, k, v, bias, IDS, dout), specs, strict=True)]
    summed = BATCH
    if manual:
        specs, summed = [P("data"), P("data"), P("data"), P(), P("data"), P("data")], ("data",)
    inner = lambda *x: run(*x, axes=summed)
    mapped = jax.shard_map(
        inner,
        mesh=mesh,
        in_specs=tuple(specs),
        out_specs=(specs[0], *specs[:4]),
        check_vma=check_vma,
        axis_names=manual or set(),
    )
    wanted = oracle.jit(run)(q, k, v, bias, jnp.asarray(IDS), dout)
    for x, y in zip(wanted, oracle.jit(mapped)(*arguments), strict=True):
        np.testing.assert_allclose(y, x, rtol=0, atol=64 * np.finfo(np.float32).eps * np.abs(x).max())


def collectives(compiled):
    """Of a program: kind, types and mesh axes of each, in the order of the text."""
    kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast"
    found = []
    for types, kind, rest in re.findall(rf" = (.*?) ({kinds})(?:-start)?\((.*)", compiled.as_text()):
        axes = re.search(r"replica_groups=mesh\S+ \{(.*?)\}", rest)
        named = tuple(axes[1].replace("'", "").split(",")) if axes else ()
        found += [(kind, shape, named) for shape in re.findall(r"\w+\[[\d,]*\]", types)]
    return sorted(found)


def summed(*shapes, axes=BATCH):
    return sorted(("all-reduce", f"f32[{shape}]", axes) for shape in shapes)


@KINDS
@pytest.mark.parametrize(
    "heads, kv_heads, bias, bias_spec, options, expected",
    [
        pytest.param(
            (4, 2),
            "tensor",
            (8, 4, 16, 16),
            P(BATCH, "tensor"),
            dict(mask=CAUSAL & eqx_attn.Segments(IDS), dropout=DROPOUT),
            [],
            id="nothing_shared",
        ),
        pytest.param((4, 1), None, None, None, {}, summed("2,16,1,16", "2,16,1,16", axes=("tensor",)), id="mqa"),
        pytest.param((4, 2), "tensor", (1, 4, 16, 16), P(None, "tensor"), {}, summed("1,2,16,16"), id="bias_of_heads"),
        pytest.param(
            (4, 2), "tensor", (8, 1, 16, 16), P(BATCH), {}, summed("2,1,16,16", axes=("tensor",)), id="bias_of_examples"
        ),
        pytest.param(
            (4, 2), "tensor", (16, 16), P(), {}, summed("1,1,16,16", axes=(*BATCH, "tensor")), id="bias_of_all"
        ),
        pytest.param((4, 2), "tensor", "sinks", P("tensor"), {}, summed("1,2"), id="sinks"),
    ],
)
def test_collectives(random_key, kind, heads, kv_heads, bias, bias_spec, options, expected):
    """None but the sums of gradients that an operand's shape asks for, each over the axes that it is not sharded over."""
    mesh = mesh_of(kind)
    *arrays, dout = qkv(random_key, 8, heads=heads)
    specs = [SPEC, P(BATCH, None, kv_heads), P(BATCH, None, kv_heads)]
    if bias is not None:
        arrays.append(_bias((4,) if bias == "sinks" else bias))
        specs.append(bias_spec)
    learned = {} if bias is None else {"sinks" if bias == "sinks" else "bias": True}

    def attend(q, k, v, *operand):
        return plain(**options, **dict.fromkeys(learned, *operand))(q, k, v)

    run, arguments = gradients(attend, *arrays, dout)
    arguments = [put(mesh, x, spec) for x, spec in zip(arguments, (*specs, SPEC), strict=True)]
    compiled = jax.jit(run).lower(*arguments).compile()
    assert collectives(compiled) == expected
    for result, spec in zip(compiled(*arguments), (SPEC, *specs), strict=True):
        assert result.sharding.is_equivalent_to(NamedSharding(mesh, spec), result.ndim)


@KINDS
def test_vmap_moves_nothing(random_key, kind):
    """Neither over an axis that is not sharded, with a batch that is, nor over batch axes of which both are."""
    mesh, arrays = mesh_of(kind), qkv(random_key, 3, 4)
    for attend, spec in (
        (jax.vmap(plain()), P(None, BATCH, None, "tensor")),
        (plain(), P(None, BATCH, None, "tensor")),
    ):
        run, arguments = gradients(attend, *arrays)
        compiled = jax.jit(run).lower(*(put(mesh, x, spec) for x in arguments)).compile()
        assert collectives(compiled) == []


@KINDS
def test_consumer_that_permutes_and_reshards(random_key, kind):
    """CASES 7 and 8: the output's sharding wins, and the gradient is not permuted, as a random cotangent shows."""
    mesh, (q, k, v, dout) = mesh_of(kind), qkv(random_key, 8)
    elsewhere = NamedSharding(mesh, P(None, BATCH))
    reshard = jax.reshard if kind == AxisType.Explicit else lax.with_sharding_constraint

    def attend(q, k, v, moved=True):
        out = plain()(q, k, v)
        out = reshard(out, elsewhere) if moved else out
        return jnp.flip(out, 0) * jnp.arange(1.0, 9)[:, None, None, None]

    run, _ = gradients(attend, q, k, v, dout)
    one_device, _ = gradients(lambda *x: attend(*x, moved=False), q, k, v, dout)
    arguments = [
        put(mesh, x, spec) for x, spec in zip((q, k, v, dout), (SPEC, SPEC, SPEC, elsewhere.spec), strict=True)
    ]
    if kind == AxisType.Auto:
        _resolve._warned.clear()
        with pytest.warns(UserWarning, match=r"reshards \[batch, q_seq, q_heads, v_dim\] from .*'fsdp'.*'tensor'"):
            found = oracle.jit(run)(*arguments)
        jax.clear_caches()  # compiled again, it warns no more: a warning would be an error here
    found = oracle.jit(run)(*arguments)
    for x, y in zip(oracle.jit(one_device)(q, k, v, dout), found, strict=True):
        np.testing.assert_allclose(y, x, rtol=0, atol=64 * np.finfo(np.float32).eps * np.abs(x).max())
    for gradient in found[1:]:
        assert gradient.sharding.is_equivalent_to(NamedSharding(mesh, SPEC), 4)


def test_a_cotangent_of_another_sharding_is_refused(random_key):
    mesh = mesh_of(AxisType.Explicit)
    q, k, v, dout = qkv(random_key, 8)
    run, _ = gradients(plain(), q, k, v, dout)
    with pytest.raises(ValueError, match=r"(?s)@data,.*@\(data,fsdp\)|'data'.*fsdp"):
        jax.jit(run).trace(*(put(mesh, x, SPEC) for x in (q, k, v)), put(mesh, dout, P("data")))
    out = put(mesh, dout, SPEC)
    with pytest.raises(
        ValueError, match=r"out is sharded as P\(\('data', 'fsdp'\), .* its cotangent as P\('data', .*jax.resh"
    ):
        aligned_cotangent("out", out, put(mesh, dout, P("data")))
    assert aligned_cotangent("out", out, dout) is dout  # its type says nothing


def traced(mesh, specs, key, heads=(4, 2), batch=8):
    arrays = qkv(key, batch, heads=heads)[:3]
    return jax.jit(plain()).trace(*(put(mesh, x, spec) for x, spec in zip(arrays, specs, strict=True)))


@pytest.mark.parametrize(
    "specs, heads, message",
    [
        (
            [P(None, "data")] * 3,
            (4, 2),
            r"query of .*\[batch, q_seq, q_heads, qk_dim\] is sharded as P\(None, 'data'.*"
            r"along its sequence.*context=eqx_attn.ContextParallel\('data'\)",
        ),
        ([P("fsdp"), P("fsdp", "data"), P("fsdp", "data")], (4, 2), r"key of .*kv_seq.*ContextParallel\('data'\)"),
        ([P(None, None, None, "data")] * 3, (4, 2), r"query .* along its head dim.*jax.reshard\(query"),
        (
            [P("data"), P("fsdp"), P("data")],
            (4, 2),
            r"query and key are sharded differently along batch \(query: P\('data'.*"
            r"key: P\('fsdp'.*jax.reshard\(key",
        ),
        (
            [P(None, None, "tensor"), P(None, None, "data"), P(None, None, "data")],
            (4, 2),
            r"heads of query and key are sharded over different axes, \('tensor',\) and \('data',\)",
        ),
        (
            [P(None, None, "tensor"), P(), P()],
            (12, 3),
            r"12 query heads over 2 devices are 6 each.*3 key/value heads.*groups of 4",
        ),
        (
            [P("data", None, "tensor"), P("data", None, "tensor"), P("data")],
            (4, 2),
            r"key and value are sharded differently along kv_heads",
        ),
    ],
    ids=["q_seq", "kv_seq", "head_dim", "batch", "heads", "groups", "value"],
)
def test_refusals(random_key, specs, heads, message):
    with pytest.raises(ValueError, match=message):
        traced(mesh_of(AxisType.Explicit), specs, random_key, heads)


def test_a_batch_that_does_not_divide(random_key):
    """JAX refuses such a type: 6 examples over data x fsdp = 4 devices."""
    (q, *_), mesh = qkv(random_key, 6), mesh_of(AxisType.Explicit)

    def attend(q):
        q = jax.reshard(q, NamedSharding(mesh, P(BATCH)))
        return plain()(q, q, q)

    with pytest.raises(ValueError, match=r"\('data', 'fsdp'\).* 4 times.* dimension size 6"):
        jax.jit(attend).trace(q)


@pytest.mark.parametrize(
    "attend, shape, spec, message",
    [
        (
            eqx_attn.attention_qkvpacked,
            (8, 16, 3, 4, 16),
            P(BATCH, None, None, "tensor"),
            "qkv of shape .* along its heads",
        ),
        (
            lambda x: eqx_attn.attention_qkvfused(x, kv_heads=2),
            (8, 16, 8, 16),
            SPEC,
            r"qkv of .*packed_heads.* give query, key and value apart",
        ),
        (
            lambda x: eqx_attn.attention_kvpacked(x[:, :, 0], x),
            (8, 16, 2, 4, 16),
            P(BATCH, None, None, "tensor"),
            "heads of query are sharded over .*packed|kv of shape .* along its heads",
        ),
    ],
    ids=["qkvpacked", "qkvfused", "kvpacked"],
)
def test_packed_heads_are_not_sharded(attend, shape, spec, message):
    mesh = mesh_of(AxisType.Explicit)
    with pytest.raises(ValueError, match=message):
        jax.jit(attend).trace(put(mesh, jnp.ones(shape), spec))


@KINDS
def test_packed_arrays_by_batch(random_key, kind):
    fused = jax.random.normal(random_key, (8, 16, 8, 16))
    attend = lambda x: eqx_attn.attention_qkvfused(x, kv_heads=2, mask=CAUSAL, implementation="xla")
    dout = jax.random.normal(jax.random.key(1), (8, 16, 4, 16))
    assert_like_one_device(attend, mesh_of(kind), (fused, dout), [P(BATCH), P(BATCH)])


@KINDS
def test_layer_under_vmap(random_key, kind):
    mesh = mesh_of(kind)
    layer = eqx_attn.nn.MultiheadAttention(4, 32, num_kv_heads=2, key=random_key)
    x, dout = jax.random.normal(jax.random.key(1), (2, 8, 16, 32))
    arrays, static = eqx.partition(layer, eqx.is_array)
    leaves, structure = jax.tree.flatten(arrays)

    def apply(x, *leaves):
        layer = eqx.combine(jax.tree.unflatten(structure, leaves), static)
        return jax.vmap(lambda x: layer(x, x, x, mask=CAUSAL))(x)

    specs = [P(BATCH), *(P() for _ in leaves), P(BATCH)]
    assert_like_one_device(apply, mesh, (x, *leaves, dout), specs)


def test_sharded_export(random_key):
    mesh, (q, k, v, dout) = mesh_of(AxisType.Explicit), qkv(random_key, 8)
    run, _ = gradients(plain(), q, k, v, dout)
    arguments = [put(mesh, x, SPEC) for x in (q, k, v, dout)]
    exported = jax.export.deserialize(jax.export.export(jax.jit(run))(*arguments).serialize())
    for x, y in zip(jax.jit(run)(*arguments), jax.jit(exported.call)(*arguments), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("implementation", ["triton", "pallas_tpu"])
@pytest.mark.parametrize("check_vma", [True, None], ids=["vma", "explicit"])
def test_interpreted_kernels(random_key, implementation, check_vma):
    """On explicit axes, and in a user's shard_map with its bookkeeping."""
    mesh = mesh_of(AxisType.Explicit, (2,), ("data",))
    arrays = qkv(random_key, 2, heads=(2, 1), dims=(64, 64))
    run, _ = gradients(plain(implementation=implementation), *arrays)
    wanted, _ = gradients(plain(), *arrays)
    if check_vma:
        run = jax.shard_map(run, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    with eqx_attn.interpret():
        found = oracle.jit(run)(*(put(mesh, x, P("data")) for x in arrays))
    for x, y in zip(oracle.jit(wanted)(*arrays), found, strict=True):
        np.testing.assert_allclose(y, x, rtol=0, atol=64 * np.finfo(np.float32).eps * np.abs(x).max())


def shapes(mesh, spec, batch=2):
    dims = [(batch, 128, heads, 64) for heads in (4, 2, 2, 4)]
    return [jax.ShapeDtypeStruct(x, jnp.bfloat16, sharding=NamedSharding(mesh, spec)) for x in dims]


@pytest.mark.parametrize("check_vma", [True, None], ids=["vma", "explicit"])
def test_lowers_for_cuda_inside_shard_map(check_vma):
    pytest.importorskip("triton")
    mesh, spec = mesh_of(AxisType.Explicit, (2, 2), ("data", "tensor")), P("data", None, "tensor")
    run, _ = gradients(plain(implementation=None))
    if check_vma:
        run = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec)
    with eqx_attn.target("sm_90a"):
        text = jax.jit(run).trace(*shapes(mesh, spec)).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("triton_kernel_call_ffi") == 3 and "manual_computation" in text
    assert "tensor<1x128x2x64xbf16>" in text  # the kernels see a device's share


def test_compiles_for_a_tpu_inside_shard_map():
    pytest.importorskip("libtpu")
    from jax.experimental.topologies import get_topology_desc

    devices = np.array(get_topology_desc(platform="tpu", topology_name="v6e:2x2").devices).reshape(2, 2)
    mesh = jax.sharding.Mesh(devices, ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    run, _ = gradients(plain(implementation=None))
    traced = jax.jit(run).trace(*shapes(mesh, P("data", None, "tensor")))
    compiled = traced.lower(lowering_platforms=("tpu",)).compile()
    assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == 2
    assert collectives(compiled) == []


@KINDS
def test_shardings_that_only_jit_knows(random_key, kind):
    """Arrays without a mesh in their types, sharded by `in_shardings`: found by propagation."""
    mesh, arrays = mesh_of(kind), qkv(random_key, 8)
    run, _ = gradients(plain(), *arrays)
    compiled = jax.jit(run, in_shardings=NamedSharding(mesh, SPEC)).lower(*arrays).compile()
    assert collectives(compiled) == []


def test_auto_axes_beside_manual_ones(random_key):
    """Left to XLA: right, and with a warning where a kernel would gather."""
    kinds = (AxisType.Explicit, AxisType.Auto, AxisType.Explicit)
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=kinds)
    assert_like_one_device(plain(), mesh, qkv(random_key, 8), [SPEC] * 4)


def test_a_kernel_beside_manual_axes_warns():
    pytest.importorskip("triton")
    mesh = mesh_of(AxisType.Auto, (2, 2), ("data", "tensor"))
    mapped = jax.shard_map(
        plain(implementation=None), mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}
    )
    _resolve._warned.clear()
    with eqx_attn.target("sm_90a"), pytest.warns(UserWarning, match=r"cannot share out the mesh axes \('tensor',\)"):
        jax.jit(mapped).trace(*shapes(mesh, P("data", None, "tensor"))[:3])


@KINDS
def test_axes_of_one_device_divide_nothing(kind):
    """A trainer's specs name all axes of its mesh, whatever their sizes: tokens over an axis of one device are whole."""
    mesh = jax.make_mesh((2, 1, 1), ("data", "context", "tensor"), axis_types=(kind,) * 3, devices=jax.devices()[:2])
    query = jax.random.normal(jax.random.key(0), (2, 16, 4, 8))
    arrays = (query, query[:, :, :2] + 1, _bias((2, 4, 16, 16)), jnp.asarray(IDS[:2]))
    specs = (P("data", "context", "tensor"), P("data", "context"), P("data", "tensor", "context"), P("data", "context"))

    def loss(query, key, bias, ids):
        mask = CAUSAL & eqx_attn.Segments(ids)
        out = eqx_attn.attention(query, key, key, mask=mask, bias=bias, implementation="xla")
        return jnp.sum(jnp.sin(out) * query), out  # out and query of one type

    step = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))
    wanted = step(*arrays)
    with jax.set_mesh(mesh):
        grads, out = step(*(put(mesh, x, spec) for x, spec in zip(arrays, specs, strict=True)))
    assert out.sharding.spec[:3] == ("data", "context", "tensor")
    for found, x in zip(jax.tree.leaves((grads, out)), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(found, x, atol=1e-6)
    if kind == AxisType.Explicit:
        for grad, spec in zip(grads, specs, strict=False):
            assert tuple(grad.sharding.spec)[: len(spec)] == tuple(spec)
