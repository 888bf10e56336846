"""What the static measure has to know of each TPU generation."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Generation:
    """One TensorCore of a TPU generation.

    Cycles are those that one instruction keeps its unit busy. They follow from the compiler's own capacity figures, in
    the `hlo-static-bundle-profile` that it dumps (bundles over capacity).
    """

    topology: str
    """The smallest one that libtpu compiles for."""
    chip_config: dict[str, str]
    """How libtpu is told that the cores of a chip work as one device, where that is not its default."""
    matrix_units: int
    matrix_size: int
    """A matrix unit holds a stationary square of so many rows and columns."""
    matmul_cycles: dict[str, int]
    """By kind of operand, for one `vmatmul`."""
    push_cycles: dict[str, int]
    """By kind of operand, for one push of 8 rows of the stationary operand."""
    exponential_cycles: float
    peak_flops: float
    """bfloat16, of a chip, as published."""
    cores: int
    """TensorCores of a chip."""
    vmem_bytes: int
    """Of a core."""
    bandwidth: float
    """Of a chip's memory, bytes a second, as published."""

    @property
    def flops_per_cycle(self) -> float:
        """bfloat16, of one core."""
        multipliers = self.matrix_units * self.matrix_size**2
        return 2 * multipliers * ROWS["bf16"] / self.matmul_cycles["bf16"]

    @property
    def clock(self) -> float:
        """Cycles a second at which the published peak would be reached."""
        return self.peak_flops / self.cores / self.flops_per_cycle


ROWS = {"f32": 8, "bf16": 16, "8bit": 32, "half": 8}
"""Rows of the moving operand that one `vmatmul` takes; "half" is a bfloat16 one that takes half as many."""

_SMALL = {"f32": 8, "bf16": 16, "8bit": 16, "half": 8}
_LARGE = {"f32": 4, "bf16": 8, "8bit": 8, "half": 4}
_SLOW_PUSH = {"f32": 8, "bf16": 8, "8bit": 8}
_FAST_PUSH = {"f32": 2, "bf16": 4, "8bit": 4}
_MIB = 2**20

GENERATIONS = {
    "v4": Generation(
        "v4:2x2x1", {"chip_config_name": "megacore"}, 4, 128, _SMALL, _SLOW_PUSH, 2.0, 275e12, 2, 16 * _MIB, 1.23e12
    ),
    "v5e": Generation("v5e:2x2", {}, 4, 128, _SMALL, _FAST_PUSH, 1.0, 197e12, 1, 128 * _MIB, 0.82e12),
    "v5p": Generation("v5p:2x2x1", {}, 4, 128, _SMALL, _FAST_PUSH, 1.0, 459e12, 2, 64 * _MIB, 2.77e12),
    "v6e": Generation("v6e:2x2", {}, 2, 256, _LARGE, _FAST_PUSH, 1.0, 918e12, 1, 128 * _MIB, 1.64e12),
    "7x": Generation("tpu7x:2x2x1", {}, 2, 256, _LARGE, _FAST_PUSH, 1.0, 2307e12, 2, 64 * _MIB, 7.37e12),
}
