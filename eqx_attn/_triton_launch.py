"""What is recorded of a call of a Triton kernel when it is traced."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ._triton_arguments import Argument, as_argument


class _ByIdentity:
    """A jitted function as a parameter of a primitive: its own hash would read the source of all that it calls."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __hash__(self) -> int:
        return id(self.kernel)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByIdentity) and self.kernel is other.kernel

    def __repr__(self) -> str:
        return self.kernel.__name__


@dataclasses.dataclass(frozen=True)
class Launch:
    """All that is known of a call when it is traced, except its arrays."""

    identity: _ByIdentity
    # Inputs, then updated arrays, then outputs: the kernel's run-time parameters in order.
    arguments: tuple[Argument, ...]
    # All results: those that are parameters of the kernel, then the updated arrays.
    outputs: tuple[jax.ShapeDtypeStruct, ...]
    updated: int
    grid: tuple[int, ...]
    num_warps: int
    num_stages: int
    # The type is there because True == 1 == 1.0, which are different constants.
    typed_constants: tuple[tuple[str, type, Any], ...]

    @property
    def kernel(self) -> Any:
        """The jitted function."""
        return self.identity.kernel

    def aliases(self, arrays: int) -> dict[int, int]:
        """Which of the call's `arrays` arrays become which of its results: the last ones of both."""
        return {arrays - number: len(self.outputs) - number for number in range(self.updated, 0, -1)}

    @property
    def constants(self) -> dict[str, Any]:
        """The `tl.constexpr` parameters by name."""
        return {name: value for name, _, value in self.typed_constants}

    @property
    def parameters(self) -> dict[str, Argument]:
        """The run-time parameters by name."""
        constants = self.constants
        names = [name for name in self.kernel.arg_names if name not in constants]
        return dict(zip(names, self.arguments, strict=True))


def record_launch(
    kernel: Any,
    inputs: Sequence[Any],
    updated: Sequence[Any],
    outputs: Sequence[Any],
    grid: tuple[int, ...],
    num_warps: int,
    num_stages: int,
    constants: dict[str, Any],
) -> tuple[Launch, list[Array]]:
    """Checks a call's arguments (see `triton_call`) and returns what tracing knows of it, and its input arrays."""
    if not 1 <= len(grid) <= 3 or any(extent < 1 for extent in grid):
        raise ValueError(f"triton_call: grid must be one to three positive ints, found {grid}.")
    constants = _with_defaults(kernel, constants)
    expected = len(kernel.params) - len(constants)
    if len(inputs) + len(updated) + len(outputs) != expected:
        found = (
            f"{len(inputs)} inputs{f', {len(updated)} updated arrays' if updated else ''} and {len(outputs)} outputs"
        )
        raise TypeError(f"triton_call: {kernel.__name__} has {expected} run-time parameters, found {found}.")
    of_inputs = [as_argument(f"input {number}", value) for number, value in enumerate(inputs)]
    of_updated = [as_argument(f"updated array {number}", value) for number, value in enumerate(updated)]
    of_outputs = [as_argument(f"output {number}", value) for number, value in enumerate(outputs)]
    launch = Launch(
        identity=_ByIdentity(kernel),
        arguments=tuple(argument for argument, _ in (*of_inputs, *of_updated, *of_outputs)),
        outputs=tuple(jax.ShapeDtypeStruct(like.shape, like.dtype) for _, like in (*of_outputs, *of_updated)),
        updated=len(updated),
        grid=tuple(grid),
        num_warps=num_warps,
        num_stages=num_stages,
        typed_constants=tuple((name, type(value), value) for name, value in constants.items()),
    )
    return launch, [jnp.asarray(array) for _, array in (*of_inputs, *of_updated) if array is not None]


def _with_defaults(kernel: Any, constants: dict[str, Any]) -> dict[str, Any]:
    constexprs = [parameter for parameter in kernel.params if parameter.is_constexpr]
    values = {p.name: p.default for p in constexprs if p.has_default} | constants
    if difference := values.keys() ^ {parameter.name for parameter in constexprs}:
        raise TypeError(
            f"triton_call: {kernel.__name__} has the tl.constexpr parameters {[p.name for p in constexprs]}, "
            f"`constants` gives {list(constants)}; the difference is {sorted(difference)}."
        )
    return values
