"""Equinox modules on top of `eqx_attn.attention`."""

from ._cache import KVCache as KVCache
from ._multihead import MultiheadAttention as MultiheadAttention
from ._rotary import RotaryEmbedding as RotaryEmbedding
