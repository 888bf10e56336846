"""RotaryEmbedding: equinox's convention, offsets and positions, and no table shared between thetas."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_attn.nn import RotaryEmbedding


def _heads(seq=24, heads=3, dim=16, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(0), (seq, heads, dim), dtype)


def _angle_tolerance(largest_position, x):
    """Both sides round angles of up to `largest_position` to float32, which moves a rotated x by as much."""
    return 4 * np.finfo(np.float32).eps * (largest_position + 1) * float(jnp.max(jnp.abs(x)))


@pytest.mark.smoke
@pytest.mark.parametrize("theta", [10_000.0, 500.0])
def test_equals_equinox(theta):
    eqx.clear_caches()  # equinox's table does not know which theta it was made for
    x = _heads(seq=200)
    expected = jax.vmap(eqx.nn.RotaryPositionalEmbedding(16, theta), in_axes=1, out_axes=1)(x)
    eqx.clear_caches()
    actual = RotaryEmbedding(16, theta)(x)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=_angle_tolerance(200, x))
    np.testing.assert_array_equal(RotaryEmbedding(16, theta)(x[:, 1]), actual[:, 1])


def test_case_27_thetas_differ():
    x = _heads()
    first, second = RotaryEmbedding(16, theta=10_000.0)(x), RotaryEmbedding(16, theta=500.0)(x)
    assert float(jnp.max(jnp.abs(first - second))) > 0.1
    np.testing.assert_array_equal(RotaryEmbedding(16, theta=10_000.0)(x), first)


def test_rotates_pairs_by_the_stated_angle():
    rotary, x = RotaryEmbedding(4, theta=100.0), jnp.asarray([[1.0, 2.0, 3.0, 4.0]])
    turned = np.asarray(rotary(x, offset=7))[0]
    for channel, frequency in ((0, 1.0), (1, 0.1)):
        pair = complex(x[0, channel], x[0, channel + 2]) * np.exp(7j * frequency)
        np.testing.assert_allclose([turned[channel], turned[channel + 2]], [pair.real, pair.imag], atol=1e-5)


def test_offset_equals_one_shot_also_traced():
    rotary, x = RotaryEmbedding(16), _heads()
    whole = rotary(x)
    chunk = jax.jit(lambda x, offset: rotary(x, offset=offset))
    parts = [chunk(x[start : start + 8], start) for start in (0, 8, 16)]
    tokens = [rotary(x[i : i + 1], offset=jnp.asarray(i)) for i in range(24)]
    # The angles are equal to the bit; jit may fuse the product and the sum, which saves one rounding.
    tolerance = 2 * np.finfo(np.float32).eps * float(jnp.max(jnp.abs(x)))
    np.testing.assert_allclose(jnp.concatenate(parts), whole, rtol=0, atol=tolerance)
    np.testing.assert_allclose(jnp.concatenate(tokens), whole, rtol=0, atol=tolerance)


def test_positions_inside_documents():
    rotary, x = RotaryEmbedding(16), _heads(seq=9)
    positions = jnp.asarray([0, 1, 2, 3, 0, 1, 0, 1, 2])
    packed = rotary(x, positions=positions)
    for start, stop in ((0, 4), (4, 6), (6, 9)):
        np.testing.assert_array_equal(packed[start:stop], rotary(x[start:stop]))


def test_products_depend_on_the_difference_of_positions():
    rotary, x = RotaryEmbedding(16), _heads(seq=2, heads=1)[:, 0]
    near, far = (rotary(x, positions=jnp.asarray([start, start + 3])) for start in (0, 50))
    np.testing.assert_allclose(near[0] @ near[1], far[0] @ far[1], atol=16 * _angle_tolerance(53, x**2))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_half_precision(dtype):
    x = _heads(dtype=dtype)
    out = RotaryEmbedding(16)(x)
    assert out.dtype == dtype
    exact = RotaryEmbedding(16)(x.astype(jnp.float32))
    largest = float(jnp.max(jnp.abs(exact)))
    np.testing.assert_allclose(out.astype(jnp.float32), exact, rtol=0, atol=float(jnp.finfo(dtype).eps) * largest)
    assert RotaryEmbedding(16, dtype=dtype)(x).dtype == dtype


def test_transformations():
    rotary, x = RotaryEmbedding(16), _heads()
    batch = jnp.stack([x, 2 * x])
    offsets = jnp.asarray([0, 5])
    mapped = jax.vmap(lambda x, offset: rotary(x, offset=offset))(batch, offsets)
    np.testing.assert_allclose(mapped[1], rotary(2 * x, offset=5), rtol=0, atol=1e-5)
    weight = jax.random.normal(jax.random.key(1), x.shape)
    # A rotation's gradient is the inverse rotation: it keeps the norm of each head.
    grad = eqx.filter_jit(jax.grad(lambda x: jnp.sum(rotary(x) * weight)))(x)
    np.testing.assert_allclose(jnp.linalg.norm(grad, axis=-1), jnp.linalg.norm(weight, axis=-1), rtol=1e-5)
    assert jax.tree.leaves(rotary) == []


@pytest.mark.parametrize(
    "build, error, message",
    [
        (lambda: RotaryEmbedding(15), ValueError, "embedding_size is 15.*even"),
        (lambda: RotaryEmbedding(-2), ValueError, "embedding_size is -2.*not negative"),
        (lambda: RotaryEmbedding(16, theta=0.0), ValueError, "theta is 0.0.*positive"),
        (lambda: RotaryEmbedding(16, dtype=jnp.int32), ValueError, "dtype is int32.*floating"),
        (lambda: RotaryEmbedding(16)(jnp.ones((2, 5, 3, 16))), ValueError, r"x has shape \(2, 5, 3, 16\).*jax.vmap"),
        (lambda: RotaryEmbedding(16)(jnp.ones((5, 3, 8))), ValueError, r"x has shape \(5, 3, 8\).*embedding_size 16"),
        (lambda: RotaryEmbedding(16)(jnp.ones((5, 16), jnp.int32)), TypeError, "x has dtype int32"),
        (lambda: RotaryEmbedding(16)(_heads(), offset=1.5), TypeError, "offset must be one integer"),
        (lambda: RotaryEmbedding(16)(_heads(), offset=jnp.arange(24)), TypeError, r"offset.*\(24,\).*`positions`"),
        (lambda: RotaryEmbedding(16)(_heads(), positions=jnp.arange(5)), ValueError, r"positions has shape \(5,\).*24"),
        (lambda: RotaryEmbedding(16)(_heads(), positions=jnp.ones(24)), TypeError, "positions has dtype float32"),
        (lambda: RotaryEmbedding(16)(_heads(), positions=jnp.arange(24), offset=2), ValueError, "not both"),
    ],
)
def test_bad_input(build, error, message):
    with pytest.raises(error, match=message):
        build()
