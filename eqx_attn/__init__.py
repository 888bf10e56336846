"""Attention for JAX and Equinox whose kernels are written by templates."""

from . import nn as nn, sharding as sharding
from ._attention import attention as attention
from ._context import interpret as interpret, target as target
from ._dropout import Dropout as Dropout
from ._explain import explain as explain
from ._masks import (
    BlockSparse as BlockSparse,
    Causal as Causal,
    Chunked as Chunked,
    Dilated as Dilated,
    Full as Full,
    Mask as Mask,
    PrefixLM as PrefixLM,
    Segments as Segments,
    SlidingWindow as SlidingWindow,
)
from ._merge import merge as merge
from ._packed import (
    attention_kvpacked as attention_kvpacked,
    attention_qkvfused as attention_qkvfused,
    attention_qkvpacked as attention_qkvpacked,
    attention_ragged as attention_ragged,
)
from ._serve import AttentionOutput as AttentionOutput
from .sharding._context import ContextParallel as ContextParallel
