"""Sequences over the devices of a mesh axis: equal to one device, by strategy, order, mask and feature."""

import itertools
import math

import contexts
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from eqx_attn import (
    attention_qkvpacked,
    attention_ragged,
    BlockSparse,
    Causal,
    Chunked,
    ContextParallel,
    Dilated,
    Dropout,
    Full,
    PrefixLM,
    Segments,
    SlidingWindow,
)
from eqx_attn.sharding import positions
from eqx_attn.sharding._gathered_order import to_dealt, to_original
from eqx_attn.sharding._order import Order

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
RANDOM = np.random.default_rng(0)
IDS = RANDOM.integers(0, 4, (4, 24))
DOCUMENTS = np.sort(RANDOM.integers(1, 5, (4, 24)), axis=1)


def bias(*shape):
    return jnp.asarray(RANDOM.normal(size=shape), jnp.float32)


# Each strategy meets each order, type of axes, kind of mask and feature, and 8 devices are split in every way; not every
# combination is there.
CASES = dict(
    causal=("ring contiguous", EXPLICIT, dict(context=8), Causal(), {}),
    causal_dual=("ring dual_chunk", AUTO, dict(tensor=2, context=4), Causal(), dict(sinks=True)),
    causal_striped=("ring striped", EXPLICIT, dict(data=2, context=4), Causal(), dict(bias=bias(1, 4, 24, 24))),
    narrow=(
        *("ring dual_chunk", EXPLICIT, dict(data=4, context=2), Causal()),
        dict(dtype="bfloat16", bias=bias(1, 4, 1, 24).astype(jnp.bfloat16), sinks=True),
    ),
    odd=("ring dual_chunk", EXPLICIT, dict(context=3), SlidingWindow(5, 2), dict(bias=bias(4, 1, 1, 24))),
    window=("ring contiguous", AUTO, dict(fsdp=2, context=4), SlidingWindow(4, 1), dict(dropout=True)),
    window_bottom=(
        *("ring striped", EXPLICIT, dict(tensor=4, context=2), SlidingWindow(9, 3, "bottom_right")),
        dict(kv_seq=32, layout="bhsd"),
    ),
    full=("ring striped", AUTO, dict(context=2, tensor=2), Full(), dict(dropout=True, dims=(16, 8))),
    four_axes=("ring dual_chunk", EXPLICIT, dict(data=2, fsdp=1, tensor=2, context=2), Causal(), dict(softcap=2.0)),
    fsdp=("ring contiguous", EXPLICIT, dict(data=2, fsdp=2, context=2), Causal() & Segments(DOCUMENTS), dict(bias=bias(4, 1, 24, 24))),
    ids=("ring striped", AUTO, dict(fsdp=2, tensor=2, context=2), Segments(IDS, IDS[:, ::-1]), dict(sinks=True)),
    ids_dual=("ring dual_chunk", EXPLICIT, dict(fsdp=4, context=2), SlidingWindow(3, 1) & Segments(IDS), {}),
    prefix=("ring contiguous", EXPLICIT, dict(context=4), PrefixLM(jnp.array([3, 0, 9, 24])), {}),
    refined=("ring striped", EXPLICIT, dict(context=4), Causal() & Chunked(7) & Dilated(2), {}),
    dense=("ring dual_chunk", EXPLICIT, dict(context=2), None, dict(dense=True)),
    blocks=("ring contiguous", EXPLICIT, dict(context=2), BlockSparse(RANDOM.random((6, 4)) < 0.5, (4, 6)), {}),
    uneven=("ring contiguous", EXPLICIT, dict(context=4), SlidingWindow(9, 3, "bottom_right"), dict(q_seq=21, kv_seq=27)),
    uneven_full=("all_gather contiguous", AUTO, dict(context=4), Full(), dict(q_seq=21, kv_seq=27, dropout=True)),
    gather=("all_gather contiguous", EXPLICIT, dict(data=2, context=4), Causal(), dict(bias=bias(1, 4, 1, 24))),
    gather_dual=(
        *("all_gather dual_chunk", AUTO, dict(data=2, context=2)),
        *(Causal() & Segments(IDS) & BlockSparse(RANDOM.random((4, 4)) < 0.7, 6), dict(sinks=True, bias=bias(1, 4, 24, 24))),
    ),
    gather_striped=("all_gather striped", EXPLICIT, dict(context=2, tensor=2), SlidingWindow(5, 0), dict(dropout=True)),
    heads=("all_to_all contiguous", EXPLICIT, dict(data=2, context=2), Causal(), dict(sinks=True, bias=bias(1, 1, 24, 24))),
    heads_dual=("all_to_all dual_chunk", AUTO, dict(context=4), Causal() & Segments(IDS), dict(bias=bias(4, 4, 24, 1))),
    heads_striped=("all_to_all striped", EXPLICIT, dict(context=2, tensor=2), SlidingWindow(5, 0), dict(dropout=True)),
)  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_equals_one_device(name, random_key):
    how, kind, splits, mask, given = CASES[name]
    strategy, order = how.split()
    given = dict(given)
    sizes = (given.pop("q_seq", 24), given.pop("kv_seq", 24))
    options = dict(layout=given.pop("layout", "bshd"))
    options["dtype"] = given.pop("dtype", "float32")
    inputs = oracle.random_inputs(random_key, *sizes, batch=(4,), dims=given.pop("dims", (16, 16)), **options)
    if given.pop("dense", False):
        mask = Causal() & (RANDOM.random((4, 1, *sizes)) < 0.7)
    sinks = jnp.array([-1.0, 2.0, 0.5, 0.0]) if given.pop("sinks", False) else None
    dropout = Dropout(0.3, jax.random.key(5)) if given.pop("dropout", False) else None
    context = ContextParallel("context", strategy, order)
    mesh = contexts.mesh_of(splits, kind)
    contexts.check(mesh, context, inputs, mask, oracle.Extras(sinks=sinks, **given), dropout)


def splits_of_eight():
    """All meshes of 8 devices and four axes, as sizes by axis."""
    sizes = itertools.product((1, 2, 4, 8), repeat=len(contexts.AXES))
    return [dict(zip(contexts.AXES, split, strict=True)) for split in sizes if math.prod(split) == 8]


def test_every_split_of_eight_devices_is_there():
    there = [splits for _, _, splits, *_ in CASES.values()]
    for wanted in splits_of_eight():
        if wanted["context"] > 1:
            assert any({**dict.fromkeys(contexts.AXES, 1), **splits} == wanted for splits in there), wanted


WITHOUT = [splits for splits in splits_of_eight() if splits["context"] == 1]


@pytest.mark.parametrize("number", range(len(WITHOUT)))
def test_a_context_of_one_device(number, random_key):
    """With the rest of eight devices split in every way: nothing is left for the strategies to do."""
    kind, strategy = (EXPLICIT, AUTO)[number % 2], ("ring", "all_gather", "all_to_all")[number % 3]
    inputs = oracle.random_inputs(random_key, 8, 8, batch=(8,), heads=(8, 4), dims=(8, 8))
    context = ContextParallel("context", strategy, "dual_chunk")
    contexts.check(contexts.mesh_of(WITHOUT[number], kind), context, inputs, Causal())


@pytest.mark.parametrize(
    "order", [Order("contiguous", 1, 4), Order("dual_chunk", 1, 4), Order("dual_chunk", 1, 3), Order("striped", 2, 4)]
)
def test_gathered_keys_lie_in_their_original_order(order):
    """And so do blocks of them, in which a range of visible ones has no holes."""
    seq = 48
    x = np.arange(2 * seq * 3).reshape(2, seq, 3)
    stored = x[:, order.positions(seq)]
    np.testing.assert_array_equal(to_original(order, jnp.asarray(stored), 1, seq), x)
    np.testing.assert_array_equal(to_dealt(order, jnp.asarray(x), 1, seq), stored)
    blocks = order.positions(seq)[::2] // 2  # tokens of a block stay neighbours in all of these
    np.testing.assert_array_equal(to_original(order, jnp.asarray(blocks), 0, seq), np.arange(seq // 2))


@pytest.mark.parametrize("order", ["contiguous", "striped"])
def test_metadata_of_public_reports(order, random_key):
    """CASES.md 9, 10 and 11 on ranks: other segments on the other side, ranks without a segment's keys, permuted tokens."""
    q_ids = np.array([[1, 2, 2, 2, 2, 3, 3, 3], [1, 1, 1, 1, 2, 2, 2, 2]])
    kv_ids = np.array([[1, 1, 1, 2, 2, 2, 3, 3], [2, 2, 2, 2, 3, 3, 1, 0]])
    inputs = oracle.random_inputs(random_key, 8, 8)
    mesh = contexts.mesh_of(dict(context=2), EXPLICIT)
    contexts.check(mesh, ContextParallel("context", "ring", order), inputs, Causal() & Segments(q_ids, kv_ids))


def test_explicit_positions_are_in_the_arrays_order(random_key):
    """Documents of one token among them."""
    ids = np.repeat([[1, 2, 3, 4, 0]], [1, 9, 1, 3, 2], axis=1)
    places = np.concatenate([np.arange(n) for n in (1, 9, 1, 3, 2)])[None]
    inputs = oracle.random_inputs(random_key, 16, 16)
    mask = SlidingWindow(4, 0) & Segments(ids, q_positions=places)
    contexts.check(
        contexts.mesh_of(dict(context=2), EXPLICIT), ContextParallel("context", order="dual_chunk"), inputs, mask
    )


def test_packed_and_ragged_arrays(random_key):
    query, key, value = oracle.random_inputs(random_key, 24, 24, batch=(), heads=(2, 2)).arrays
    context = ContextParallel("context", order="dual_chunk")
    mesh = contexts.mesh_of(dict(context=2), EXPLICIT)
    places = positions(context, 24, 2)
    lengths = jnp.array([10, 0, 1, 8])
    sharding = NamedSharding(mesh, PartitionSpec("context"))

    def ragged(context, *arrays):
        return attention_ragged(*arrays, lengths, mask="causal", context=context, implementation="xla")

    def packed(context, *arrays):
        qkv = jnp.stack(arrays, 1)
        return attention_qkvpacked(qkv, mask="causal", context=context, implementation="xla")

    def both(function, context, *arrays):
        return jax.jit(jax.value_and_grad(lambda *x: jnp.sum(jnp.sin(function(context, *x))), (0, 1, 2)))(*arrays)

    for function in (ragged, packed):
        wanted, wanted_grads = both(function, None, query, key, value)
        with jax.set_mesh(mesh):
            found, grads = both(function, context, *(jax.device_put(x[places], sharding) for x in (query, key, value)))
        np.testing.assert_allclose(found, wanted, rtol=1e-5)
        for grad, wanted_grad in zip(grads, wanted_grads, strict=True):
            np.testing.assert_allclose(grad, wanted_grad[places], atol=1e-5)
