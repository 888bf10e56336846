"""Visit tables against the dense predicate: no visible score is missed, no hidden block is loaded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from eqx_attn import _visits
from eqx_attn._operands import BlockOperands, SegmentOperands
from eqx_attn._reference import expand_blocks
from eqx_attn._visits import (
    band_kv_visits,
    band_q_visits,
    map_kv_visits,
    map_q_visits,
    segment_kv_visits,
    segment_q_visits,
    Visits,
)

HIDDEN, PARTIAL, WHOLE = 0, 1, 2


def blocks_of(visible, block_q, block_kv):
    """What is exactly the state of each block of a dense mask `[q_seq, kv_seq]`; keys past the end are hidden ones."""
    q_seq, kv_seq = visible.shape
    states = np.zeros((-(-q_seq // block_q), -(-kv_seq // block_kv)), int)
    for i in range(states.shape[0]):
        for j in range(states.shape[1]):
            block = visible[i * block_q : (i + 1) * block_q, j * block_kv : (j + 1) * block_kv]
            full = block.all() and block.shape[1] == block_kv
            states[i, j] = WHOLE if full else PARTIAL if block.any() else HIDDEN
    return states


def walk(visits: Visits) -> np.ndarray:
    """The states, read step by step as a kernel reads them; checks that idle steps load nothing new."""
    states = np.zeros((visits.examples, visits.rows, visits.blocks), int)
    table = np.asarray(visits.table)
    examples, rows, steps = np.ogrid[: visits.examples, : visits.rows, : int(visits.steps)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_visits, "jnp", np)  # each shape of a table would be compiled
        read = [f(table, rows, steps, examples) for f in (visits.block, visits.whole, visits.partial)]
    read = [np.broadcast_to(x, states.shape[:2] + steps.shape[2:]) for x in read]
    for example, row in np.ndindex(visits.examples, visits.rows):
        block, whole, partial = (x[example, row] for x in read)
        visited = whole | partial
        assert not np.any(whole & partial)
        assert not np.any(visited[1:] & ~visited[:-1]) or visits.join > 1
        count = visited.sum()
        assert np.all(block[count:] == block[max(count - 1, 0)])
        assert len(set(block[visited])) == count
        states[example, row, block[whole]], states[example, row, block[partial]] = WHOLE, PARTIAL
    return states


bounds = st.one_of(st.none(), st.integers(-40, 40))


few = settings(max_examples=12)  # each shape of a table is compiled


@given(st.integers(1, 60), st.integers(1, 60), st.sampled_from([4, 8, 16]), st.sampled_from([4, 8, 16]), bounds, bounds)
def test_bands(q_seq, kv_seq, block_q, block_kv, lower, upper):
    distance = np.arange(kv_seq) - np.arange(q_seq)[:, None]
    visible = np.ones_like(distance, bool)
    if lower is not None:
        visible &= distance >= lower
    if upper is not None:
        visible &= distance <= upper
    visits = band_kv_visits(q_seq, kv_seq, block_q, block_kv, lower=lower, upper=upper)
    exact = blocks_of(visible, block_q, block_kv)
    np.testing.assert_array_equal(walk(visits)[0], exact)
    np.testing.assert_array_equal(visits.states()[0], exact)
    assert visits.steps == max(1, (exact > 0).sum(1).max())
    reverse = band_q_visits(q_seq, kv_seq, block_q, block_kv, lower=lower, upper=upper)
    np.testing.assert_array_equal(walk(reverse)[0], blocks_of(visible.T, block_kv, block_q))


def segments_of(q_ids, kv_ids, q_positions, kv_positions) -> SegmentOperands:
    def int32(x):
        return jnp.asarray(x, jnp.int32)

    return SegmentOperands(
        int32(np.where(q_ids > 0, q_ids, -1)),
        int32(np.where(kv_ids > 0, kv_ids, -2)),
        int32(q_positions),
        int32(kv_positions),
    )


def visible_of(segments: SegmentOperands, lower, upper) -> np.ndarray:
    visible = np.asarray(segments.q_ids)[:, :, None] == np.asarray(segments.kv_ids)[:, None, :]
    distance = np.asarray(segments.kv_positions)[:, None, :] - np.asarray(segments.q_positions)[:, :, None]
    visible &= distance >= (-100 if lower is None else lower)
    return visible & (distance <= (100 if upper is None else upper))


@few
@given(st.integers(0, 2**32 - 1), st.booleans(), st.sampled_from([1, 3, 8]), bounds, bounds)
def test_segments(seed, is_sorted, count, lower, upper):
    generator = np.random.default_rng(seed)
    q_seq, kv_seq = 37, 50
    q_ids, kv_ids = (generator.integers(0, count + 1, size=(2, seq)) for seq in (q_seq, kv_seq))
    if is_sorted:
        q_ids.sort(), kv_ids.sort()
    segments = segments_of(q_ids, kv_ids, generator.integers(0, 30, (2, q_seq)), generator.integers(0, 30, (2, kv_seq)))
    visible = visible_of(segments, lower, upper)
    for visits, seen, blocks in [
        (segment_kv_visits(segments, 8, 4, lower=lower, upper=upper), visible, (8, 4)),
        (segment_q_visits(segments, 8, 4, lower=lower, upper=upper), visible.swapaxes(1, 2), (4, 8)),
    ]:
        states = walk(visits)
        np.testing.assert_array_equal(visits.states(), states)
        exact = np.stack([blocks_of(example, *blocks) for example in seen])
        assert np.all((exact == HIDDEN) | (states != HIDDEN)), "a visible block is not visited"
        assert np.all((states != WHOLE) | (exact != PARTIAL)), "a block that needs a mask is called whole"


def packed(lengths, causal=True) -> SegmentOperands:
    ids = np.repeat(np.arange(1, len(lengths) + 1), lengths)[None]
    positions = np.concatenate([np.arange(length) for length in lengths])[None]
    return segments_of(ids, ids, positions, positions)


def test_packed_documents_visit_exactly_what_is_visible():
    segments = packed([5, 40, 3, 3, 2, 64, 11, 30, 50])
    for upper, lower in [(0, None), (0, -9), (None, None)]:
        visits = segment_kv_visits(segments, 8, 8, lower=lower, upper=upper)
        np.testing.assert_array_equal(walk(visits)[0], blocks_of(visible_of(segments, lower, upper)[0], 8, 8))


@pytest.mark.parametrize("visits_of", [segment_kv_visits, segment_q_visits])
def test_nothing_visible(visits_of):
    ids = np.zeros((2, 20), int)
    visits = visits_of(segments_of(ids, ids, ids, ids), 4, 4, upper=0)
    assert int(visits.steps) == 1 and not walk(visits).any()


@given(st.integers(1, 90), st.sampled_from([8, 16, 30]), bounds)
def test_joined_blocks_cover_the_same(seq, words, upper):
    exact = band_kv_visits(seq, 75, 4, 4, upper=upper).states()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_visits, "MAX_WORDS", words)
        visits = band_kv_visits(seq, 75, 4, 4, upper=upper)
        segments = packed([seq]) if seq == 75 else None
        tables = [visits] + ([segment_kv_visits(segments, 4, 4, upper=upper)] if segments else [])
    for table in tables:
        assert table.table.size <= words or table.join >= 32
        states = walk(table)
        np.testing.assert_array_equal(table.states(), states)
        assert np.all((exact == HIDDEN) | (states != HIDDEN)) and np.all((states != WHOLE) | (exact == WHOLE))


@pytest.mark.parametrize("seq", [2**16, 2**20, 2**23])
def test_memory_is_bounded(seq):
    """Also at 8 million tokens: no table beyond scalar memory, and no intermediate of quadratic size."""
    assert band_kv_visits(seq, seq, 512, 512, upper=0).table.size <= _visits.MAX_WORDS
    ids = jax.ShapeDtypeStruct((1, seq), jnp.int32)
    segments = SegmentOperands(ids, ids, ids, ids)
    jaxpr = jax.make_jaxpr(lambda segments: segment_kv_visits(segments, 512, 512, upper=0).table)(segments)
    sizes = [variable.aval.size for equation in jaxpr.jaxpr.eqns for variable in equation.outvars]
    assert jaxpr.out_avals[0].size <= _visits.MAX_WORDS and max(sizes) <= max(seq, _visits.MAX_WORDS)


@few
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2]), st.booleans(), st.sampled_from([None, 0, 12]))
def test_maps_of_blocks(seed, heads, with_segments, upper):
    """Visits under a map, its blocks larger and smaller than the kernel's, with bounds and segments."""
    generator = np.random.default_rng(seed)
    q_seq, kv_seq, batch = 37, 50, 4
    blocks = BlockOperands(jnp.asarray(generator.random((2, heads, 4, 17)) < 0.4), 10, 3)
    expanded = expand_blocks(blocks, np.arange(q_seq), np.arange(kv_seq))
    visible = np.asarray(expanded)[np.arange(batch) // 2]
    segments = None
    if with_segments:
        ids = [np.sort(generator.integers(0, 4, (batch, seq))) for seq in (q_seq, kv_seq)]
        segments = segments_of(*ids, *(np.broadcast_to(np.arange(seq), (batch, seq)) for seq in (q_seq, kv_seq)))
        visible = visible & visible_of(segments, None, None)[:, None]
    if upper is not None:
        visible = visible & (np.arange(kv_seq) - np.arange(q_seq)[:, None] <= upper)
    for visits, seen, sizes in [
        (map_kv_visits(blocks, batch, q_seq, kv_seq, 8, 4, upper=upper, segments=segments), visible, (8, 4)),
        (map_q_visits(blocks, batch, q_seq, kv_seq, 8, 4, upper=upper, segments=segments), visible.mT, (4, 8)),
    ]:
        states = walk(visits)
        for example, head in np.ndindex(batch, heads):
            state, exact = states[visits.example(example, head)], blocks_of(seen[example, head], *sizes)
            assert np.all((exact == HIDDEN) | (state != HIDDEN)), "a visible block is not visited"
            assert np.all((state != WHOLE) | (exact != PARTIAL)), "a block that needs a mask is called whole"
            if not with_segments and upper is None:
                np.testing.assert_array_equal(state, exact)
