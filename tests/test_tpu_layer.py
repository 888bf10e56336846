"""What a whole attention layer moves around its kernels, in the program that libtpu compiles for it without a TPU."""

import math
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import eqx_attn
from eqx_attn.bench._static import Block, lower, Program

BATCH, SEQ, HEADS, HEAD_DIM = 2, 384, 8, 128
ARRAY = BATCH * SEQ * HEADS * HEAD_DIM
STATISTICS = BATCH * SEQ * HEADS
"""The elements of lse, and of the sums over out * dout."""


def moves(function, *arguments):
    """The elements that each copy, transpose and reshape of the compiled program moves.

    What moves nothing is a bitcast there. Prefetches into vector memory (`copy-start`) keep the layout, and do not count.
    """
    _, lowered = lower(Program(function, arguments, lambda call: Block(1, 1, 1)), "v6e")
    text = lowered.compile().as_text()
    assert 'custom_call_target="tpu_custom_call"' in text and " fusion(" in text
    shapes = re.findall(r" = \w+\[([\d,]*)\]\S* (?:copy|transpose|reshape)\(", text)
    return [math.prod(map(int, shape.split(","))) for shape in shapes]


def layer_and_input(head_dim=HEAD_DIM, rotary=False):
    def build(key):
        rotated = eqx_attn.nn.RotaryEmbedding(head_dim) if rotary else None
        width = HEADS * head_dim
        return eqx_attn.nn.MultiheadAttention(HEADS, width, rotary=rotated, dtype=jnp.bfloat16, key=key)

    parameters, static = eqx.partition(
        eqx.filter_eval_shape(build, jax.random.key(0)), lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct)
    )

    def forward(parameters, x):
        layer = eqx.combine(parameters, static)
        with eqx_attn.target("v6e"):
            return jax.vmap(lambda x: layer(x, x, x, mask=eqx_attn.Causal()))(x)

    return forward, parameters, jax.ShapeDtypeStruct((BATCH, SEQ, HEADS * head_dim), jnp.bfloat16)


def test_the_forward_of_a_layer_moves_nothing():
    forward, parameters, x = layer_and_input()
    assert moves(forward, parameters, x) == []


def test_the_backward_of_a_layer_moves_statistics_and_one_product():
    """Attention moves lse and the sums over out * dout. Of arrays as large as its own there is only that product, which a
    fusion reorders in registers to sum it by heads. What is as large as a weight is a gradient of eqx.nn.Linear.
    """
    forward, parameters, x = layer_and_input()
    backward = lambda parameters, x, dout: jax.vjp(forward, parameters, x)[1](dout)
    sizes = moves(backward, parameters, x, x)
    weight = (HEADS * HEAD_DIM) ** 2
    assert [size for size in sizes if size > STATISTICS and size != weight] == [ARRAY]
    assert 0 < sizes.count(STATISTICS) <= 5


@pytest.mark.parametrize("case", [dict(head_dim=64), dict(rotary=True)], ids=["head_dim_64", "rotary"])
def test_what_explain_says_is_moved_is_found(case):
    """A transpose where a head does not fill the lanes; the reshape where what comes before attention is no product."""
    forward, parameters, x = layer_and_input(**case)
    assert math.prod(x.shape) in moves(forward, parameters, x)
