"""The kernels that are checked in, each there for a named family of models.

Everything else is rendered on demand. The whole matrix stays below about 120 files, so a new row names who needs it.
"""

import dataclasses
import fnmatch
import itertools

from .spec import KernelSpec, Layout, MaskKind, Target


@dataclasses.dataclass(frozen=True)
class Family:
    """Models that share a mask: `needed_by` names them, and the rest is a product over targets, layouts and dims.

    `dims` holds head dims (or pairs of query/key dim and value dim, where they differ).
    """

    needed_by: str
    mask: MaskKind
    dims: tuple[int | tuple[int, int], ...]
    segments: bool = False
    layouts: tuple[Layout, ...] = (Layout.BSHD, Layout.BHSD)
    targets: tuple[Target, ...] = (Target.PALLAS_TPU, Target.TRITON)

    def specs(self) -> list[KernelSpec]:
        """The family's kernels."""
        return [
            KernelSpec(target, layout, self.mask, *(dim if isinstance(dim, tuple) else (dim, dim)), self.segments)
            for target, layout, dim in itertools.product(self.targets, self.layouts, self.dims)
        ]


FAMILIES = (
    Family("dense decoders (GPT, Llama, Qwen; Gemma at 256)", MaskKind.CAUSAL, (64, 128, 256)),
    Family("decoders on packed documents", MaskKind.CAUSAL, (64, 128, 256), segments=True),
    Family("local layers (Mistral, Gemma; ModernBERT at 64)", MaskKind.WINDOW, (64, 128, 256)),
    Family("local layers on packed documents", MaskKind.WINDOW, (128, 256), segments=True),
    Family("unpadded ModernBERT", MaskKind.WINDOW, (64,), segments=True, layouts=(Layout.BSHD,)),
    Family("padded encoders (BERT, T5, Whisper)", MaskKind.FULL, (64, 128), segments=True),
    Family("vision and diffusion (ViT, SigLIP, Flux, Wan)", MaskKind.FULL, (64, 128)),
    Family("Gemma encoders (T5Gemma, EmbeddingGemma)", MaskKind.FULL, (256,), layouts=(Layout.BSHD,)),
    Family("padded Gemma encoders", MaskKind.FULL, (256,), segments=True, layouts=(Layout.BSHD,)),
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
