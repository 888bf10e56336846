"""Masks: what each one shows, how they compose, their positions, and what they refuse."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import strategies as st

from eqx_attn import Causal, Full, Segments, SlidingWindow
from eqx_attn._masks import as_mask
from eqx_attn._plan import plan_mask
from eqx_attn._reference import visible_keys
from eqx_attn._segments import count_of_ids, ranks_within_ids
from eqx_attn._serve import operands_for, Options, prepare, sizes_of

ALIGNMENTS = ("top_left", "bottom_right")


def planned(mask, shape):
    """What the kernels are told of a mask, as a dense array of `shape`: [batch, q_heads, q_seq, kv_seq]."""
    batch, q_heads, q_seq, kv_seq = shape
    operands = operands_for(plan_mask(as_mask(mask), (batch,), q_heads, q_seq, kv_seq), 1.0)
    return np.broadcast_to(np.asarray(visible_keys(operands, q_seq, kv_seq)), shape)


def assert_same(mask, shape):
    np.testing.assert_array_equal(planned(mask, shape), oracle.visible(mask, shape))


# Few lengths, since each is compiled for; 1, equal ones, and either side longer are among them.
lengths = st.sampled_from([1, 5, 8])
counts = st.none() | st.integers(0, 14)


@st.composite
def bands(draw, alignments=ALIGNMENTS):
    alignment = draw(st.sampled_from(alignments))
    if draw(st.booleans()):
        return Causal(alignment)
    return SlidingWindow(draw(counts), draw(counts), alignment)


@st.composite
def segment_masks(draw, batch, q_seq, kv_seq):
    ids = st.integers(-2, 4) | st.sampled_from([7, 2**31 - 1, -(2**31)])

    def row(elements, seq):
        leading = draw(st.sampled_from([(), (1,), (batch,)]))
        size = int(np.prod((*leading, seq)))
        return np.array(draw(st.lists(elements, min_size=size, max_size=size)), np.int32).reshape(*leading, seq)

    q_ids = row(ids, q_seq)
    kv_ids = None if q_seq == kv_seq and draw(st.booleans()) else row(ids, kv_seq)
    if draw(st.booleans()):
        return Segments(q_ids, kv_ids)
    positions = st.integers(-5, 12)
    return Segments(q_ids, kv_ids, row(positions, q_seq), None if kv_ids is None else row(positions, kv_seq))


@st.composite
def cases(draw):
    shape = batch, _, q_seq, kv_seq = draw(st.integers(1, 3)), 2, draw(lengths), draw(lengths)
    segments = draw(st.none() | segment_masks(batch, q_seq, kv_seq))
    alignments = ALIGNMENTS if segments is None else (draw(st.sampled_from(ALIGNMENTS)),)
    if segments is not None and segments.explicit_positions:
        alignments = ("top_left",)
    mask = Full()
    for part in draw(st.permutations([segments, *draw(st.lists(bands(alignments), max_size=2))])):
        if part is not None:
            mask = mask & part
    if draw(st.booleans()):
        axes = [draw(st.sampled_from([1, size])) for size in shape][draw(st.integers(0, 3)) :]
        mask = mask & jnp.asarray(np.random.default_rng(draw(st.integers(0, 99))).random(axes) < 0.7)
    return mask, shape


@hypothesis.settings(max_examples=60)
@hypothesis.given(cases())
def test_any_composition_equals_the_predicate(case):
    assert_same(*case)


@pytest.mark.smoke
@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize("mask", [Causal, lambda alignment: SlidingWindow(2, 1, alignment)], ids=["causal", "window"])
def test_alignment(mask, alignment):
    for q_seq, kv_seq in ((4, 9), (9, 4), (5, 5), (1, 7), (7, 1)):
        assert_same(mask(alignment), (1, 1, q_seq, kv_seq))
        last = planned(mask(alignment), (1, 1, q_seq, kv_seq))[0, 0, -1, -1]
        if alignment == "bottom_right":
            assert last  # the last query sees the last key


def test_window_counts_are_inclusive():
    shape = (1, 1, 9, 9)

    def row(*window):
        return np.flatnonzero(planned(SlidingWindow(*window), shape)[0, 0, 4]).tolist()

    assert row(0, 0) == [4]
    assert row(1, 0) == [3, 4]
    assert row(2, 1) == [2, 3, 4, 5]
    assert row(None, 1) == [0, 1, 2, 3, 4, 5]
    assert row(1, None) == [3, 4, 5, 6, 7, 8]
    np.testing.assert_array_equal(planned(SlidingWindow(None, 0), shape), planned(Causal(), shape))
    np.testing.assert_array_equal(planned(SlidingWindow(None, None), shape), planned(Full(), shape))


def test_and_is_commutative_and_associative():
    shape = (2, 2, 6, 8)
    dense = jnp.asarray(np.random.default_rng(0).random((2, 1, 6, 8)) < 0.6)
    a, b, c = SlidingWindow(3, 2), Causal("bottom_right"), Segments([1, 1, 2, 2, 0, 3], [1, 2, 2, 3, 3, 3, 0, 1])
    window = SlidingWindow(4, None)
    for left, right in (
        (a & b, b & a),
        ((a & b) & window, a & (b & window)),
        (c & a & window, window & (c & a)),
        (dense & a, a & dense),
        (Full() & a, a),
        (a & a, a),
    ):
        np.testing.assert_array_equal(planned(left, shape), planned(right, shape))


def test_names_and_arrays_stand_for_masks():
    assert isinstance(as_mask(None), Full) and isinstance(as_mask("causal"), Causal)
    array = np.random.default_rng(0).random((3, 4)) < 0.5
    np.testing.assert_array_equal(planned(array, (2, 2, 3, 4)), np.broadcast_to(array, (2, 2, 3, 4)))


def test_from_lengths():
    np.testing.assert_array_equal(Segments.from_lengths([2, 0, 3], 7).q_ids, [1, 1, 3, 3, 3, 0, 0])
    np.testing.assert_array_equal(Segments.from_lengths([[2, 1], [0, 0]], 3).q_ids, [[1, 1, 2], [0, 0, 0]])
    assert Segments.from_lengths([5], 3).q_ids.tolist() == [1, 1, 1]  # what a row has no room for is cut
    both = Segments.from_lengths([1, 2], 4, kv_lengths=[3, 0], kv_seq=5)
    assert (both.q_ids.tolist(), both.kv_ids.tolist()) == ([1, 2, 2, 0], [1, 1, 1, 0, 0])
    assert jax.jit(lambda x: Segments.from_lengths(x, 4).q_ids)(jnp.array([1, 2])).tolist() == [1, 2, 2, 0]


@hypothesis.given(st.lists(st.integers(0, 4), min_size=4, max_size=4), st.sampled_from([1, 7, 20]))
def test_from_lengths_of_any(sizes, seq):
    ids = [number for number, size in enumerate(sizes, 1) for _ in range(size)]
    wanted = (ids + [0] * seq)[:seq]
    assert Segments.from_lengths(sizes, seq).q_ids.tolist() == wanted


@hypothesis.given(st.lists(st.integers(-3, 4) | st.just(2**31 - 1), min_size=9, max_size=9))
def test_ranks_and_counts(ids):
    array = jnp.asarray(ids, jnp.int32)
    assert ranks_within_ids(array).tolist() == oracle.ranks(ids).tolist()
    wanted = jnp.asarray([*ids, 100], jnp.int32)
    assert count_of_ids(array, wanted).tolist() == [ids.count(int(segment)) for segment in wanted]


def test_segments_take_any_integers_and_lists():
    for ids in (
        [1, 1, 0],
        np.array([1, 1, 0], np.uint8),
        np.array([1, 1, 0], np.int64),
        jnp.array([1, 1, 0], jnp.int16),
    ):
        mask = Segments(ids)
        assert mask.q_ids.dtype == mask.kv_ids.dtype == mask.q_positions.dtype == jnp.int32
        assert mask.q_ids.tolist() == [1, 1, 0]


def test_masks_are_pytrees_of_their_arrays_alone():
    assert jax.tree.leaves(SlidingWindow(1, None) & Causal()) == []
    assert hash(SlidingWindow(1, None)) == hash(SlidingWindow(1, None))
    for given in (1, 2):  # a mask holds what it was given: what follows from that is computed in calls
        leaves = jax.tree.leaves(Segments(*[[1, 2]] * given))
        assert len(leaves) == given and all(leaf.shape == (2,) for leaf in leaves)


def plan(mask, batch_shape=(2,), q_seq=4, kv_seq=4):
    return plan_mask(as_mask(mask), batch_shape, 2, q_seq, kv_seq)


IDS = [1, 1, 2, 2]


@pytest.mark.parametrize(
    "build, error, message",
    [
        (lambda: SlidingWindow(-1, 0), ValueError, "SlidingWindow's left is -1.* int >= 0, or None"),
        (lambda: SlidingWindow(0, -3), ValueError, "SlidingWindow's right is -3"),
        (lambda: SlidingWindow(1.5, 0), ValueError, "left is 1.5"),
        (lambda: SlidingWindow(True, 0), ValueError, "left is True"),
        (lambda: Causal("bottom_left"), ValueError, "alignment is 'bottom_left': it is 'top_left' or 'bottom_right'"),
        (lambda: SlidingWindow(1, 1, "left"), ValueError, "alignment is 'left'"),
        (lambda: Segments([1.0, 2.0]), TypeError, r"q_ids has dtype float.*astype\(jnp.int32\)"),
        (lambda: Segments(IDS, [True, False]), TypeError, "kv_ids has dtype bool"),
        (lambda: Segments(3), ValueError, "q_ids is a scalar"),
        (lambda: Segments(IDS, kv_positions=IDS), ValueError, "kv_positions without kv_ids"),
        (lambda: Segments(IDS, IDS, IDS), ValueError, "one side only: give kv_positions too, or neither"),
        (lambda: Segments(IDS, IDS, None, IDS), ValueError, "one side only: give q_positions too"),
        (lambda: Segments(IDS, q_positions=[0, 1]), ValueError, r"q_positions has shape \(2,\) and q_ids \(4,\)"),
        (lambda: Segments.from_lengths([2], 4, kv_seq=3), ValueError, "kv_lengths and kv_seq together"),
        (lambda: Segments.from_lengths([2.5], 4), TypeError, "q_lengths has dtype float"),
        (lambda: as_mask("window"), ValueError, "mask is 'window': the only mask with a name is \"causal\""),
        (lambda: as_mask(jnp.zeros((4, 4))), TypeError, "mask is an array of float32.*write `mask != 0`"),
        (lambda: as_mask(3), TypeError, "mask is a int: give an eqx_attn mask, 'causal', or a boolean array"),
        (lambda: Causal() & 3, TypeError, "mask is a int"),
        (lambda: plan(Segments(IDS) & Segments(IDS)), ValueError, "combines 2 Segments: give one Segments"),
        (
            lambda: plan(Segments(IDS, q_positions=IDS) & Causal("bottom_right")),
            ValueError,
            'alignment="bottom_right" together with explicit positions.*use alignment="top_left"',
        ),
        (
            lambda: plan(Segments(IDS) & Causal("bottom_right") & SlidingWindow(1, 1)),
            ValueError,
            "both alignments with Segments: use one alignment",
        ),
        (lambda: plan(Segments([1, 1])), ValueError, r"q_ids of Segments has shape \(2,\), but query has 4 tokens"),
        (lambda: plan(Segments(IDS), kv_seq=5), ValueError, "kv_ids of Segments .* key has 5 tokens.*give kv_ids"),
        (lambda: plan(Segments([IDS] * 3)), ValueError, r"shape \(3, 4\), whose leading axes do not .* \(2,\)"),
        (
            lambda: plan(jnp.ones((3, 4), bool)),
            ValueError,
            r"boolean array of shape \(3, 4\), .* \[\*batch, q_heads, q_seq, kv_seq\] = \(2, 2, 4, 4\)",
        ),
    ],
)  # fmt: skip
def test_bad_input(build, error, message):
    with pytest.raises(error, match=message):
        build()


def test_a_window_beyond_the_lengths_is_no_window():
    """Its kernel would compare positions for nothing."""
    query = key = jax.ShapeDtypeStruct((8, 2, 64), jnp.float32)
    request, plan = prepare(sizes_of(query, key, key, "bshd"), "bshd", Options(SlidingWindow(7, 7)))
    assert (request.mask, plan.lower, plan.upper) == ("full", None, None)
    request, plan = prepare(sizes_of(query, key, key, "bshd"), "bshd", Options(SlidingWindow(7, 6)))
    assert (request.mask, plan.lower, plan.upper) == ("causal", None, 6)
    request, plan = prepare(sizes_of(query, key, key, "bshd"), "bshd", Options(SlidingWindow(6, 6)))
    assert (request.mask, plan.lower, plan.upper) == ("window", -6, 6)
