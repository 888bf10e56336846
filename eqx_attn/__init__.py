"""Attention for JAX and Equinox whose kernels are written by templates."""

from . import nn as nn
from ._attention import attention as attention, AttentionOutput as AttentionOutput
from ._context import interpret as interpret, target as target
from ._explain import explain as explain
from ._masks import (
    Causal as Causal,
    Full as Full,
    Mask as Mask,
    Segments as Segments,
    SlidingWindow as SlidingWindow,
)
from ._merge import merge as merge
