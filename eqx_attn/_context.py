"""The two contexts of a call: the device to lower for, and whether kernels run interpreted on the CPU.

Both are part of JAX's tracing cache key, so a jitted function is traced again when one of them changes. They are read
while a call is traced, once, in its forward: the backward may run after the `with` has ended and takes what the forward
found (`current_context`, `resume`).
"""

import contextlib
import dataclasses
from collections.abc import Iterator

import jax

CUDA_TARGETS = {"sm_80": 80, "sm_86": 86, "sm_89": 89, "sm_90a": 90, "sm_100": 100}
TPU_TARGETS = {
    "v4": ("TPU v4", 2),
    "v5e": ("TPU v5 lite", 1),
    "v5p": ("TPU v5", 2),
    "v6e": ("TPU v6 lite", 1),
    "7x": ("TPU7x", 1),
}
"""For each, JAX's name and the cores of a device."""

_targets = jax.make_user_context(default_value=())
_interpret = jax.make_user_context(default_value=False)


@dataclasses.dataclass(frozen=True)
class CallContext:
    """What `target(...)` and `interpret()` said when a call was traced."""

    targets: tuple[str, ...]
    interpreting: bool


@contextlib.contextmanager
def target(*names: str) -> Iterator[None]:
    """Lowers everything inside for the named device instead of the local one, which may then be absent.

    **Arguments:**

    - `names`: an NVIDIA architecture ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100") or a TPU generation ("v4", "v5e",
        "v5p", "v6e", "7x"), or one of each, to export for both at once.

    **Raises:**

    - `ValueError`: if a name is none of these, or two are of one kind.
    """
    known = [*CUDA_TARGETS, *TPU_TARGETS]
    for name in names:
        if name not in known:
            raise ValueError(f"eqx_attn.target: unknown device {name!r}; known are {', '.join(known)}.")
    platforms = [platform_of(name) for name in names]
    if len(set(platforms)) != len(names) or not names:
        raise ValueError(f"eqx_attn.target: got {names}; give one device, or one NVIDIA architecture and one TPU.")
    with _targets(names):
        yield


def platform_of(name: str) -> str:
    """JAX's name for the platform of a target."""
    return "cuda" if name in CUDA_TARGETS else "tpu"


@contextlib.contextmanager
def interpret() -> Iterator[None]:
    """Runs the kernels of an explicitly requested implementation on the CPU, under their language's interpreter.

    Slow, and meant for tests and for reading kernels with a debugger. A function jitted outside is traced again.
    """
    with _interpret(True):
        yield


def current_target(platform: str) -> str | None:
    """What the innermost `target(...)` names for a platform, "cuda" or "tpu"; None where it names nothing."""
    return next((name for name in _targets.value if platform_of(name) == platform), None)


def current_targets() -> tuple[str, ...]:
    """The names given to the innermost `target(...)`; none outside of one."""
    return _targets.value


def interpreting() -> bool:
    """Whether the call being traced is inside `interpret()`."""
    return _interpret.value


def current_context() -> CallContext:
    """Both contexts as one static value that a forward can keep for its backward."""
    return CallContext(current_targets(), interpreting())


@contextlib.contextmanager
def resume(context: CallContext) -> Iterator[None]:
    """Restores what `current_context` returned, whatever is current now."""
    with _targets(context.targets), _interpret(context.interpreting):
        yield
