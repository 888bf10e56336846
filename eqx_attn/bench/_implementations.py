"""What is compared: this package and, as peers, what comes with JAX."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .. import attention
from ._cases import Case

OURS = "eqx_attn"
PEERS = ("cudnn", "xla")


@dataclasses.dataclass(frozen=True)
class Implementation:
    """`function(query, key, value, mask)`, and the mask that it takes, made beforehand. `note` is for the reader."""

    name: str
    function: Callable
    mask: Any
    note: str = ""

    def forward(self) -> Callable:
        """`(query, key, value, dout, mask) -> out`, jitted."""
        function = self.function
        return jax.jit(lambda q, k, v, dout, mask: function(q, k, v, mask))

    def both(self) -> Callable:
        """The same arguments to the three gradients, jitted: the forward and the backward."""
        function = self.function

        def gradients(q, k, v, dout, mask):
            return jax.vjp(lambda q, k, v: function(q, k, v, mask), q, k, v)[1](dout)

        return jax.jit(gradients)


def implementations(case: Case, peers: tuple[str, ...]) -> list[Implementation]:
    """Ours first, then the peers. cuDNN's own window is one more peer where the case is a window."""
    found = [Implementation(OURS, lambda q, k, v, mask: attention(q, k, v, mask=mask), case.ours())]
    dense = case.dense()
    for peer in peers:
        found.append(
            Implementation(peer, _jax_nn(peer, case), dense, "dense boolean mask" if dense is not None else "")
        )
        if peer == "cudnn" and case.window is not None:
            function = _jax_nn(peer, case, local_window_size=(case.window - 1, 0))
            found.append(Implementation("cudnn_window", function, None, "local_window_size"))
    return found


def _jax_nn(peer: Any, case: Case, **options: Any) -> Callable:
    """`jax.nn.dot_product_attention`, causal by its flag unless a dense mask says it already."""

    def function(q, k, v, mask):
        causal = case.mask == "causal" and mask is None
        return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=causal, implementation=peer, **options)

    return function


def difference(out: Any, other: Any) -> float:
    """The relative root-mean-square difference of two outputs: a few thousandths between right ones in bfloat16."""
    out, other = (jnp.asarray(x, jnp.float32) for x in (out, other))
    return float(jnp.sqrt(jnp.mean((out - other) ** 2) / jnp.mean(other**2)))
