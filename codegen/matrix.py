"""The kernels that are checked in, each there for a named family of models.

Everything else is rendered on demand. The whole matrix stays below about 120 files, so a new row names who needs it.
"""

import dataclasses
import fnmatch
import itertools
from typing import Any

from .spec import KernelSpec, Layout, MaskKind, Target


@dataclasses.dataclass(frozen=True)
class Family:
    """Models that share a mask: `needed_by` names them, and the rest is a product over targets, layouts and dims.

    `dims` holds head dims (or pairs of query/key dim and value dim, where they differ), `options` those that each kernel
    has.
    """

    needed_by: str
    mask: MaskKind
    dims: tuple[int | tuple[int, int], ...]
    options: tuple[str, ...] = ()
    layouts: tuple[Layout, ...] = (Layout.BSHD, Layout.BHSD)
    targets: tuple[Target, ...] = (Target.PALLAS_TPU, Target.TRITON)

    def specs(self) -> list[KernelSpec]:
        """The family's kernels."""
        options: dict[str, Any] = dict.fromkeys(self.options, True)
        return [
            KernelSpec(target, layout, self.mask, *(dim if isinstance(dim, tuple) else (dim, dim)), **options)
            for target, layout, dim in itertools.product(self.targets, self.layouts, self.dims)
        ]


_SEGMENTS = ("segments",)
_HOPPER = (Target.GLUON_HOPPER,)
_BSHD, _QKV, _KV = (Layout.BSHD,), (Layout.QKV,), (Layout.KV,)

FAMILIES = (
    Family("dense decoders (GPT, Llama, Qwen; Gemma at 256)", MaskKind.CAUSAL, (64, 128, 256)),
    Family("decoders on packed documents", MaskKind.CAUSAL, (64, 128, 256), _SEGMENTS),
    Family("local layers (Mistral, Gemma; ModernBERT at 64)", MaskKind.WINDOW, (64, 128, 256)),
    Family("local layers on packed documents", MaskKind.WINDOW, (128, 256), _SEGMENTS),
    Family("unpadded ModernBERT", MaskKind.WINDOW, (64,), _SEGMENTS, _BSHD),
    Family("padded encoders (BERT, Whisper)", MaskKind.FULL, (64, 128), _SEGMENTS),
    Family("vision and diffusion (ViT, SigLIP, Flux, Wan)", MaskKind.FULL, (64, 128)),
    Family("Gemma encoders (T5Gemma, EmbeddingGemma)", MaskKind.FULL, (256,), layouts=_BSHD),
    Family("padded Gemma encoders", MaskKind.FULL, (256,), _SEGMENTS, _BSHD),
    Family("latent attention (DeepSeek V3)", MaskKind.CAUSAL, ((192, 128),), layouts=_BSHD),
    Family("latent attention on packed documents", MaskKind.CAUSAL, ((192, 128),), _SEGMENTS, _BSHD),
    Family("latent attention with clipped logits (Kimi K2)", MaskKind.CAUSAL, ((192, 128),), ("maxlogit",), _BSHD),
    Family("Gemma 2, global layers", MaskKind.CAUSAL, (256,), ("softcap",), _BSHD),
    Family("Gemma 2, local layers", MaskKind.WINDOW, (256,), ("softcap",), _BSHD),
    Family("gpt-oss, dense layers", MaskKind.CAUSAL, (64,), ("sinks",), _BSHD),
    Family("gpt-oss, banded layers", MaskKind.WINDOW, (64,), ("sinks",), _BSHD),
    Family("T5 encoders (relative positions)", MaskKind.FULL, (64,), ("bias",), _BSHD),
    Family("T5 decoders (relative positions)", MaskKind.CAUSAL, (64,), ("bias",), _BSHD),
    Family("pair-biased attention (AlphaFold, Boltz)", MaskKind.FULL, (32,), ("bias",), _BSHD),
    Family("padded pair-biased attention", MaskKind.FULL, (32,), ("segments", "bias"), _BSHD),
    Family("GPT-2 training (dropout on the weights)", MaskKind.CAUSAL, (64,), ("dropout",), _BSHD),
    Family("BERT training (dropout on the weights)", MaskKind.FULL, (64,), ("segments", "dropout"), _BSHD),
    Family("block-sparse decoders (MoBA)", MaskKind.CAUSAL, (128,), ("blocks",), _BSHD),
    Family("block-sparse diffusion (sparse Wan)", MaskKind.FULL, (128,), ("blocks",), _BSHD),
    Family("any boolean mask", MaskKind.FULL, (64, 128), ("dense",), _BSHD),
    Family("fused projections of encoders (ViT)", MaskKind.FULL, (64,), layouts=_QKV),
    Family("fused projections of decoders (GPT-NeoX, Phi)", MaskKind.CAUSAL, (128,), layouts=_QKV),
    Family("cross attention to packed keys and values", MaskKind.FULL, (64,), layouts=_KV),
    Family("dense decoders on H100 and H200", MaskKind.CAUSAL, (64, 128), targets=_HOPPER),
    Family("local layers on H100 and H200", MaskKind.WINDOW, (64, 128), targets=_HOPPER),
    Family("vision and diffusion on H100 and H200", MaskKind.FULL, (64, 128), targets=_HOPPER),
)


def checked_in() -> dict[KernelSpec, str]:
    """Every checked-in kernel, in the order of its name, with who needs it."""
    needed_by: dict[KernelSpec, list[str]] = {}
    for family in FAMILIES:
        for spec in family.specs():
            needed_by.setdefault(spec, []).append(family.needed_by)
    return {spec: "; ".join(needed_by[spec]) for spec in sorted(needed_by, key=lambda spec: spec.name)}


def matching(glob: str) -> list[KernelSpec]:
    """The checked-in kernels whose name matches a shell pattern, in which `*` also matches `/`."""
    return [spec for spec in checked_in() if fnmatch.fnmatchcase(spec.name, glob)]
