"""The one Jinja environment: a specification in, the text of its kernel out.

A template is `templates/<target>/attention.py.jinja` and emits final text; no formatter runs afterwards. It sees
every field of the specification as a plain name (`layout`, `mask`, `qk_dim`, `v_dim`, `segments`, ...), the whole of
it as `spec`, the functions that are printed into the kernel as `mods`, and the helpers of `_helpers`. Macros that
several targets share are imported by their path below `templates/`:
`{% import "macros/masks.jinja" as masks with context %}`.
"""

import dataclasses
import functools
import hashlib
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import jinja2

from .mod_text import mod_text
from .mod_text_pallas import pallas_mod_text
from .spec import KernelSpec, SpecError, Target


class RenderError(Exception):
    """A template asked for something that no kernel may have."""


def template_folder() -> Path:
    """Where the templates lie: beside `codegen/` in a checkout, beside `eqx_attn/codegen/` in a wheel."""
    return Path(__file__).parent.parent / "templates"


def template_name(spec: KernelSpec) -> str:
    """The template that writes the kernel of `spec`, below `template_folder()`."""
    return f"{spec.target}/attention.py.jinja"


def render(spec: KernelSpec) -> str:
    """The whole text of `generated/<spec.name>.py`.

    Raises `SpecError` where there is no such kernel, and `RenderError` where the template breaks a rule.
    """
    reason = spec.refusal()
    if reason is not None:
        raise SpecError(f"there is no kernel {spec.name}: {reason}")
    body = render_body(spec, environment())
    return _header(spec, body) + body


def render_body(spec: KernelSpec, environment: jinja2.Environment) -> str:
    """The text below the header, from this environment's templates."""
    grids: list[str] = []
    facts = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    template = environment.get_template(template_name(spec))
    mods = (pallas_mod_text if spec.target is Target.PALLAS_TPU else mod_text)(
        spec, functools.partial(_without_mods, spec)
    )
    body = template.render(spec=spec, mods=mods, **facts, **_helpers(grids))
    if spec.target is Target.PALLAS_TPU:
        _check_grids(body, grids)
    return body


def _without_mods(spec: KernelSpec) -> str:
    return render_body(dataclasses.replace(spec, scoremod="", maskmod=""), environment())


@functools.cache
def environment() -> jinja2.Environment:
    """The Jinja environment of all templates: an undefined name is an error, and block tags leave no blank lines."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(template_folder()),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )


# The header.


def _header(spec: KernelSpec, body: str) -> str:
    return (
        f"# Generated from templates/{template_name(spec)} by python -m codegen; do not edit.\n"
        f"# spec: {spec.name}\n"
        f"# digest: {_digest(body)}\n"
    )


def _digest(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()[:16]


_HEADER = re.compile(r"# Generated from .*\n# spec: (?P<spec>.*)\n# digest: (?P<digest>[0-9a-f]{16})\n")


def digest_of(text: str) -> str | None:
    """The digest that the header of a generated file states, or None where there is no such header."""
    match = _HEADER.match(text)
    return match["digest"] if match else None


def body_of(text: str) -> str:
    """A generated file without its header."""
    return _HEADER.sub("", text, count=1) if _HEADER.match(text) else text


def body_digest(text: str) -> str:
    """The digest of a generated file's body as it is; it differs from `digest_of` where someone edited the file."""
    return _digest(body_of(text))


# What templates may call.


def _helpers(grids: list[str]) -> dict[str, Callable]:
    """The functions that templates see. Every result of `grid_semantics` is appended to `grids`."""

    def grid_semantics(axes: Iterable[tuple[str, str, bool]]) -> str:
        """The `dimension_semantics` tuple of a grid of (name, semantics, accumulates), as text."""
        grids.append(semantics_text(axes))
        return grids[-1]

    return dict(
        power_of_two=power_of_two,
        next_power_of_two=next_power_of_two,
        grid_semantics=grid_semantics,
        fail=fail,
    )


def power_of_two(number: int) -> bool:
    """Whether `number` is 1, 2, 4, 8, ..."""
    return number > 0 and number & (number - 1) == 0


def next_power_of_two(number: int) -> int:
    """The smallest power of two that is not below `number`."""
    return 1 << (number - 1).bit_length()


def fail(message: str) -> str:
    """Stops a template that has no text for its specification."""
    raise RenderError(message)


def semantics_text(axes: Iterable[tuple[str, str, bool]]) -> str:
    """The `dimension_semantics` of a TPU grid, as text.

    Each axis is (name, "parallel" or "arbitrary", whether the kernel accumulates along it). The compiler may run the
    steps of a parallel axis in any order and on several cores, so an accumulating axis must be arbitrary: those run in
    order. Raises `RenderError` otherwise.
    """
    semantics = []
    for name, kind, accumulates in axes:
        if kind not in ("parallel", "arbitrary"):
            raise RenderError(f'grid axis {name!r} is {kind!r}; it must be "parallel" or "arbitrary"')
        if accumulates and kind == "parallel":
            raise RenderError(
                f'grid axis {name!r} accumulates and is "parallel"; make it "arbitrary", which keeps order'
            )
        semantics.append(f'"{kind}"')
    return f"({', '.join(semantics)}{',' if len(semantics) == 1 else ''})"


_SEMANTICS = re.compile(r'\(\s*(?:"(?:parallel|arbitrary)",?\s*)+\)|\bpltpu\.(?:PARALLEL|ARBITRARY)\b')


def _check_grids(body: str, grids: list[str]) -> None:
    """Rejects grid semantics that were written by hand, past the check of `semantics_text`."""
    for written in _SEMANTICS.findall(body):
        if written not in grids:
            raise RenderError(f"{written} did not come from grid_semantics(...), which checks the accumulating axes")
