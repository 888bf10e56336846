"""The one door to the code generator, which is `codegen` in a checkout and `eqx_attn.codegen` in a wheel."""

import importlib
from pathlib import Path

_INSTALLED = (Path(__file__).parent / "codegen").is_dir()

REPOSITORY = Path(__file__).parent if _INSTALLED else Path(__file__).parent.parent
"""The folder that holds `codegen`, `templates` and `generated`."""

_package = "eqx_attn.codegen" if _INSTALLED else "codegen"
_spec = importlib.import_module(f"{_package}.spec")

KernelSpec, Layout, MaskKind, Target, nearest = (
    getattr(_spec, name) for name in ("KernelSpec", "Layout", "MaskKind", "Target", "nearest")
)
_program = importlib.import_module(f"{_package}.program")
Literal, Capture, Step, Program = (getattr(_program, name) for name in ("Literal", "Capture", "Step", "Program"))
ARGUMENTS, register, find_program = _program.ARGUMENTS, _program.register, _program.find
printer = importlib.import_module(f"{_package}.printer")
mod_reads = importlib.import_module(f"{_package}.mod_reads")


def render(spec) -> str:
    """The text of the kernel of `spec`; Jinja is imported only when a kernel is rendered."""
    return importlib.import_module(f"{_package}.render").render(spec)


def digests(text: str) -> tuple[str | None, str]:
    """The digest that a generated file's header states, and the digest of its body as it is."""
    module = importlib.import_module(f"{_package}.render")
    return module.digest_of(text), module.body_digest(text)
