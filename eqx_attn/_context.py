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
TPU_TARGETS = ("v4", "v5e", "v5p", "v6e", "7x")

_target = jax.make_user_context(default_value=None)
_interpret = jax.make_user_context(default_value=False)


@dataclasses.dataclass(frozen=True)
class CallContext:
    """What `target(...)` and `interpret()` said when a call was traced."""

    target: str | None
    interpreting: bool


@contextlib.contextmanager
def target(name: str) -> Iterator[None]:
    """Lowers everything inside for the named device instead of the local one, which may then be absent.

    **Arguments:**

    - `name`: an NVIDIA architecture ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100") or a TPU generation ("v4", "v5e",
        "v5p", "v6e", "7x").

    **Raises:**

    - `ValueError`: if the name is none of these.
    """
    known = [*CUDA_TARGETS, *TPU_TARGETS]
    if name not in known:
        raise ValueError(f"eqx_attn.target: unknown device {name!r}; known are {', '.join(known)}.")
    with _target(name):
        yield


@contextlib.contextmanager
def interpret() -> Iterator[None]:
    """Runs the kernels of an explicitly requested implementation on the CPU, under their language's interpreter.

    Slow, and meant for tests and for reading kernels with a debugger. A function jitted outside is traced again.
    """
    with _interpret(True):
        yield


def current_target() -> str | None:
    """The name given to the innermost `target(...)`, or None."""
    return _target.value


def interpreting() -> bool:
    """Whether the call being traced is inside `interpret()`."""
    return _interpret.value


def current_context() -> CallContext:
    """Both contexts as one static value that a forward can keep for its backward."""
    return CallContext(current_target(), interpreting())


@contextlib.contextmanager
def resume(context: CallContext) -> Iterator[None]:
    """Restores what `current_context` returned, whatever is current now."""
    with _target(context.target), _interpret(context.interpreting):
        yield
