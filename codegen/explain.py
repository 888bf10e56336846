"""What each choice of a specification turned into: in words, in branches of templates, and in lines of kernel text."""

import dataclasses
import difflib
from typing import Any

from .render import body_of, power_of_two, render
from .spec import KernelSpec, Layout, MaskKind, Target
from .trace import Branch, branches_taken, outermost


@dataclasses.dataclass(frozen=True)
class Choice:
    """One field of a specification, and what it cost or brought compared with one other value of the field.

    `branches` are those that write this kernel and not `other`; `added` and `removed` count the lines in which the two
    kernels differ. `other` is None for the target, whose kernels share no template.
    """

    field: str
    value: str
    words: str
    other: KernelSpec | None = None
    branches: tuple[Branch, ...] = ()
    added: int = 0
    removed: int = 0


def explain(spec: KernelSpec) -> list[Choice]:
    """One `Choice` for each field of `spec`. Raises `SpecError` where there is no such kernel."""
    body, taken = body_of(render(spec)), branches_taken(spec)
    choices = []
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        choice = Choice(
            field.name, "yes" if value is True else "no" if value is False else str(value), words(spec, field)
        )
        other = alternative(spec, field)
        if other is not None and not other.refusals():
            added, removed = count_changes(body_of(render(other)), body)
            extra = tuple(outermost(taken - branches_taken(other)))
            choice = dataclasses.replace(choice, other=other, branches=extra, added=added, removed=removed)
        choices.append(choice)
    return choices


def alternative(spec: KernelSpec, field: dataclasses.Field) -> KernelSpec | None:
    """The kernel to compare with, which differs from `spec` in this field.

    Where value has query's and key's dim, it keeps it when theirs is exchanged: two dims instead of one are a choice
    of their own, which `v_dim` shows.
    """
    value = getattr(spec, field.name)
    if isinstance(value, Target) or value == "":  # nothing that could be there instead
        return None
    if isinstance(value, bool):
        other = not value
    elif field.type is str:
        other = ""
    elif isinstance(value, int):  # The other kind of dim, since powers of two differ in numbers only.
        other = 96 if power_of_two(value) else 128
    else:
        members: Any = type(value)
        other = next(member for member in members if member is not value)  # the first of them
    changes = {field.name: other}
    if field.name == "qk_dim" and spec.v_dim == spec.qk_dim:
        changes["v_dim"] = other
    return dataclasses.replace(spec, **changes)


def count_changes(before: str, after: str) -> tuple[int, int]:
    """How many lines `after` adds to `before` and removes from it."""
    lines = [line[:1] for line in difflib.ndiff(before.splitlines(), after.splitlines())]
    return lines.count("+"), lines.count("-")


_TARGETS = {
    Target.PALLAS_TPU: "Pallas kernels for the Mosaic TPU compiler (libtpu)",
    Target.GLUON_HOPPER: "Triton's Gluon dialect for sm_90a: TMA, asynchronous products, warps with a role each",
    Target.TRITON: "plain @triton.jit kernels with pointers and strides, for sm_80 and up",
}
_LAYOUTS = {
    Layout.BSHD: "arrays are [batch, seq, heads, dim], read in place",
    Layout.BHSD: "arrays are [batch, heads, seq, dim], read in place",
    Layout.QKV: "one array [batch, seq, q_heads + 2 * kv_heads, dim], read in place",
    Layout.KV: "a query, and one array [batch, kv_seq, 2 * kv_heads, dim], read in place",
}
_MASKS = {
    MaskKind.FULL: "no bound on positions: all key blocks are visited, only the last one needs a mask (its tail)",
    MaskKind.CAUSAL: "kv_position - q_position <= upper: key blocks beyond it are skipped, those across it masked",
    MaskKind.WINDOW: "lower <= kv_position - q_position <= upper: only key blocks inside the band are visited",
}


_OPTIONS = {
    "segments": ("one sequence an example: positions are row numbers", ""),
    "blocks": ("no map of blocks", "a boolean map says which blocks are visited"),
    "dense": ("no boolean array", "a boolean array is read by tile"),
    "bias": ("no bias", "an array is added to the scores; one more kernel makes its gradient"),
    "softcap": ("scores are not bounded", "scores are softcap * tanh(score / softcap)"),
    "sinks": ("no sinks", "a logit per head counts in the denominator"),
    "dropout": ("no dropout", "weights are dropped by a hash of global indices"),
    "maxlogit": ("the largest scores stay inside", "the forward also returns each row's largest score"),
}
_MODS = {
    "scoremod": "a user's function makes of each score another one",
    "maskmod": "a user's function hides keys",
}


def words(spec: KernelSpec, field: dataclasses.Field) -> str:
    """What the value of this field means for the kernel."""
    value = getattr(spec, field.name)
    if field.name == "segments" and value:
        positions = "" if spec.mask is MaskKind.FULL else ", positions are operands"
        return f"a token sees only keys of its own id{positions}; blocks whose ids do not meet are skipped"
    if field.type is bool:
        without, with_it = _OPTIONS[field.name]
        return with_it if value else without
    if field.type is str:
        return _MODS[field.name] if value else "no function"
    if field.type is int:
        kind = "a power of two" if power_of_two(value) else "not a power of two"
        return f"{'query and key' if field.name == 'qk_dim' else 'value'} rows have {value} columns, {kind}"
    return {**_TARGETS, **_LAYOUTS, **_MASKS}[value]
