"""Sequences over the devices of a mesh axis: equal to one device, by strategy, order, mask and feature."""

import contexts
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import AxisType

from eqx_attn import (
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

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
RANDOM = np.random.default_rng(0)
IDS = RANDOM.integers(0, 4, (4, 24))
DOCUMENTS = np.sort(RANDOM.integers(1, 5, (4, 24)), axis=1)


def bias(*shape):
    return jnp.asarray(RANDOM.normal(size=shape), jnp.float32)


# Each strategy meets each order, type of axes, kind of mask and feature; not every combination is there.
CASES = dict(
    causal=("ring contiguous", EXPLICIT, dict(context=4), Causal(), {}),
    causal_dual=("ring dual_chunk", AUTO, dict(context=4), Causal(), dict(sinks=True)),
    causal_striped=("ring striped", EXPLICIT, dict(data=2, context=4), Causal(), dict(bias=bias(1, 4, 24, 24))),
    narrow=(
        *("ring dual_chunk", EXPLICIT, dict(data=2, context=2), Causal()),
        dict(dtype="bfloat16", bias=bias(1, 4, 1, 24).astype(jnp.bfloat16), sinks=True),
    ),
    odd=("ring dual_chunk", EXPLICIT, dict(context=3), SlidingWindow(5, 2), dict(bias=bias(4, 1, 1, 24))),
    window=("ring contiguous", AUTO, dict(data=2, context=4), SlidingWindow(4, 1), dict(dropout=True)),
    window_bottom=(
        *("ring striped", EXPLICIT, dict(context=2, tensor=2), SlidingWindow(9, 3, "bottom_right")),
        dict(kv_seq=32, layout="bhsd"),
    ),
    full=("ring striped", AUTO, dict(context=2, tensor=2), Full(), dict(dropout=True, dims=(16, 8))),
    four_axes=("ring dual_chunk", EXPLICIT, dict(data=2, fsdp=1, tensor=2, context=2), Causal(), dict(softcap=2.0)),
    fsdp=("ring contiguous", EXPLICIT, dict(data=2, fsdp=2, context=2), Causal() & Segments(DOCUMENTS), dict(bias=bias(4, 1, 24, 24))),
    ids=("ring striped", AUTO, dict(context=4), Segments(IDS, IDS[:, ::-1]), dict(sinks=True)),
    ids_dual=("ring dual_chunk", EXPLICIT, dict(context=4), SlidingWindow(3, 1) & Segments(IDS), {}),
    prefix=("ring contiguous", EXPLICIT, dict(context=4), PrefixLM(jnp.array([3, 0, 9, 24])), {}),
    refined=("ring striped", EXPLICIT, dict(context=4), Causal() & Chunked(7) & Dilated(2), {}),
    dense=("ring dual_chunk", EXPLICIT, dict(context=2), None, dict(dense=True)),
    blocks=("ring contiguous", EXPLICIT, dict(context=2), BlockSparse(RANDOM.random((6, 4)) < 0.5, (4, 6)), {}),
    uneven=("ring contiguous", EXPLICIT, dict(context=4), SlidingWindow(9, 3, "bottom_right"), dict(q_seq=21, kv_seq=27)),
    uneven_full=("all_gather contiguous", AUTO, dict(context=4), Full(), dict(q_seq=21, kv_seq=27, dropout=True)),
    gather=("all_gather contiguous", EXPLICIT, dict(data=2, context=4), Causal(), dict(bias=bias(1, 4, 1, 24))),
    gather_dual=("all_gather dual_chunk", AUTO, dict(data=2, context=2), Causal() & Segments(IDS), dict(sinks=True)),
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
