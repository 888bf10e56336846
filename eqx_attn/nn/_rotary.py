"""Rotary position embedding."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from beartype import beartype
from jaxtyping import Array, Float, Int, jaxtyped, PRNGKeyArray


def _default_dtype() -> Any:
    return jnp.float64 if jax.config.jax_enable_x64 else jnp.float32


class RotaryEmbedding(eqx.Module):
    """Rotary position embedding: rotates pairs of channels by an angle that grows with a token's position.

    Channel `i` is paired with channel `i + embedding_size / 2`, and the pair turns by
    `position * theta ** (-2 * i / embedding_size)`, as in `equinox.nn.RotaryPositionalEmbedding`. The product of a
    rotated query and a rotated key depends on the difference of their positions only.

    Unlike equinox's, it takes an offset or explicit positions, so that a sequence processed in chunks gets the same
    rotation as in one shot, and it keeps no table, so that two embeddings cannot share one by mistake.

    From [RoFormer](https://arxiv.org/abs/2104.09864).

    >>> import jax.numpy as jnp
    >>> import eqx_attn
    >>> rotary = eqx_attn.nn.RotaryEmbedding(64)
    >>> heads = jnp.ones((10, 4, 64))  # [seq, heads, dim]
    >>> later = rotary(heads[6:], offset=6)
    >>> bool(jnp.allclose(later, rotary(heads)[6:]))
    True

    **Arguments:**

    - `embedding_size`: channels of one head; even.
    - `theta`: the base of the frequencies. Larger values turn more slowly.
    - `dtype`: in which sine and cosine enter the product. The angles are computed in float32 (float64 in x64 mode)
        whatever it is. Defaults to the same.

    Raises `ValueError` if `embedding_size` is negative or odd, or `theta` is not positive.
    """

    embedding_size: int = eqx.field(static=True)
    theta: float = eqx.field(static=True, default=10_000.0)
    dtype: Any = eqx.field(static=True, default_factory=_default_dtype)

    def __check_init__(self):
        if self.embedding_size < 0 or self.embedding_size % 2:
            raise ValueError(
                f"embedding_size is {self.embedding_size}; channels are rotated in pairs, so it must be even and not "
                "negative. It is usually the size of one head, not that of the whole embedding."
            )
        if self.theta <= 0:
            raise ValueError(f"theta is {self.theta}; it is the base of the frequencies and must be positive.")
        if not jnp.issubdtype(self.dtype, jnp.floating):
            raise ValueError(f"dtype is {jnp.dtype(self.dtype)}; sine and cosine need a floating dtype.")

    @jax.named_scope("eqx_attn.nn.RotaryEmbedding")
    def __call__(
        self,
        x: Float[Array, "seq heads dim"] | Float[Array, "seq dim"],
        *,
        offset: int | Int[Array, ""] = 0,
        positions: Int[Array, " seq"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "seq heads dim"] | Float[Array, "seq dim"]:
        """**Arguments:**

        - `x`: `[seq, heads, embedding_size]` or `[seq, embedding_size]`, floating.
        - `offset`: the position of the first token, for instance the number of tokens already in a cache. May be
            traced.
        - `positions`: each token's position, integers `[seq]`, instead of `offset + arange(seq)`; for instance the
            position inside its document.
        - `key`: ignored; there so that the module can stand in `equinox.nn.Sequential`.

        **Returns:** the rotated `x`, of the same shape and dtype.

        Raises `ValueError` or `TypeError` for shapes and dtypes other than these.
        """
        del key
        x = jnp.asarray(x)
        self._check(x, offset, positions)
        if positions is None:
            positions = jnp.arange(x.shape[0], dtype=jnp.int32) + jnp.asarray(offset).astype(jnp.int32)
        return _rotate(x, jnp.asarray(positions), self.theta, self.dtype)

    def _check(self, x, offset, positions):
        if x.ndim not in (2, 3):
            raise ValueError(
                f"x has shape {x.shape}; RotaryEmbedding takes one sequence, [seq, heads, {self.embedding_size}] or "
                f"[seq, {self.embedding_size}]. Map over a batch with jax.vmap."
            )
        if x.shape[-1] != self.embedding_size:
            raise ValueError(
                f"x has shape {x.shape}, whose last dimension is not the embedding_size {self.embedding_size}. "
                "Pass heads of that size, or build RotaryEmbedding with the size of one head."
            )
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"x has dtype {x.dtype}; a rotation needs a floating dtype.")
        if jnp.shape(offset) != () or not _is_integer(offset):
            raise TypeError(
                f"offset must be one integer, found shape {jnp.shape(offset)} and dtype {jnp.result_type(offset)}. "
                "Pass one position per token as `positions`."
            )
        if positions is None:
            return
        if isinstance(offset, jax.Array) or offset != 0:
            raise ValueError("Pass either offset or positions, not both: add the offset to the positions.")
        if jnp.shape(positions) != (x.shape[0],):
            raise ValueError(
                f"positions has shape {jnp.shape(positions)}; x has shape {x.shape}, so one position for each of its "
                f"{x.shape[0]} tokens is needed: ({x.shape[0]},)."
            )
        if not _is_integer(positions):
            raise TypeError(f"positions has dtype {jnp.result_type(positions)}; positions are integers.")


def _is_integer(x) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.integer)


@jaxtyped(typechecker=beartype)
def _rotate(
    x: Float[Array, "seq *heads dim"], positions: Int[Array, " seq"], theta: float | int, dtype: Any
) -> Float[Array, "seq *heads dim"]:
    half = x.shape[-1] // 2
    exponent = np.arange(0, x.shape[-1], 2) / max(x.shape[-1], 1)
    frequency = jnp.asarray(1.0 / theta**exponent, _default_dtype())  # [half]
    angle = positions.astype(frequency.dtype)[:, None] * frequency[None, :]  # [seq, half]
    angle = angle.reshape(angle.shape[:1] + (1,) * (x.ndim - 2) + angle.shape[1:])  # [seq, (1,) half]
    with jax.numpy_dtype_promotion("standard"):
        wide = jnp.promote_types(x.dtype, dtype)
    cos = jnp.broadcast_to(jnp.cos(angle).astype(dtype).astype(wide), (*x.shape[:-1], half))
    sin = jnp.broadcast_to(jnp.sin(angle).astype(dtype).astype(wide), (*x.shape[:-1], half))
    low, high = x[..., :half].astype(wide), x[..., half:].astype(wide)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(x.dtype)
