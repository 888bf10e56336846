"""Text from a trained model."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PRNGKeyArray

from ._data import START
from ._model import GPT


@eqx.filter_jit
def _continue(
    model: GPT, tokens: Int[Array, " length"], known: Int[Array, ""], temperature: float, key: PRNGKeyArray
) -> Int[Array, " length"]:
    """Fills `tokens` from index `known` on, one byte at a time; the causal mask hides what is not written yet."""
    segment_ids = jnp.ones_like(tokens)

    def write(i, tokens):
        logits = model(tokens, segment_ids)[i - 1].astype(jnp.float32)
        token = jax.random.categorical(jax.random.fold_in(key, i), logits / temperature)
        return tokens.at[i].set(token.astype(tokens.dtype))

    return jax.lax.fori_loop(known, tokens.shape[0], write, tokens)


def sample(model: GPT, prompt: str, length: int, temperature: float = 0.7, seed: int = 0) -> str:
    """`prompt` continued up to `length` bytes, or to where the model begins another document."""
    start = [START, *prompt.encode()][:length]
    tokens = jnp.asarray(start + [0] * (length - len(start)), jnp.int32)
    tokens = _continue(model, tokens, jnp.asarray(len(start)), temperature, jax.random.key(seed))
    text = bytes(tokens.tolist()[1:]).split(bytes([START]))[0]
    return text.decode(errors="replace")
