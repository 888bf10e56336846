"""What a kernel is generated for: the specification, its name, and why some combinations have no kernel.

Only what changes the *text* of a kernel is a field here. Scale, window width, dtype, sequence lengths and tile sizes
are arguments of the generated functions.
"""

import dataclasses
import difflib
import enum
import re
from collections.abc import Iterable
from typing import Any


class Target(enum.StrEnum):
    """The language and compiler that a kernel is written for."""

    PALLAS_TPU = "pallas_tpu"
    TRITON = "triton"
    GLUON_HOPPER = "gluon_hopper"


class Layout(enum.StrEnum):
    """Where query, key and value lie.

    `BSHD` and `BHSD`: three arrays `[batch, seq, heads, dim]` or `[batch, heads, seq, dim]`. `QKV`: one array
    `[batch, seq, q_heads + 2 * kv_heads, dim]` whose heads are those of the query, then of the key, then of the value.
    `KV`: a query as for `BSHD`, and one array `[batch, kv_seq, 2 * kv_heads, dim]`, the key's heads before the value's.
    """

    BSHD = "bshd"
    BHSD = "bhsd"
    QKV = "qkv"
    KV = "kv"

    @property
    def packed(self) -> bool:
        """Whether one array holds several of query, key and value."""
        return self in (Layout.QKV, Layout.KV)


class MaskKind(enum.StrEnum):
    """The shape of the positional predicate `lower <= kv_position - q_position <= upper`.

    `FULL` has no bound, `CAUSAL` only the upper one, `WINDOW` both. The bounds' values are arguments.
    """

    FULL = "full"
    CAUSAL = "causal"
    WINDOW = "window"


MAX_HEAD_DIM = 256


class SpecError(ValueError):
    """A name that describes no kernel, or a combination for which there is none."""


@dataclasses.dataclass(frozen=True, order=True)
class KernelSpec:
    """One kernel's text.

    `qk_dim` and `v_dim` are the head dims of query/key and of value. The options:

    - `segments`: each token has an id (tokens see only their own id) and, where the mask has a bound, a position that
        replaces the token's index.
    - `blocks`: a boolean map says which blocks of keys a block of queries sees.
    - `dense`: a boolean array says which keys a query sees.
    - `bias`: an array is added to the scores; its gradient has a kernel of its own.
    - `softcap`: scores are `cap * tanh(score / cap)`.
    - `sinks`: a logit per head counts in the softmax's denominator.
    - `dropout`: some weights are 0 and the others larger.
    - `maxlogit`: the forward also returns each row's largest visible score.
    - `scoremod`, `maskmod`: a user's function makes of a score another one, or hides keys; the digest of its
        `program.Program`, or "" where there is none.
    """

    target: Target
    layout: Layout
    mask: MaskKind
    qk_dim: int
    v_dim: int
    segments: bool = False
    blocks: bool = False
    dense: bool = False
    bias: bool = False
    softcap: bool = False
    sinks: bool = False
    dropout: bool = False
    maxlogit: bool = False
    scoremod: str = ""
    maskmod: str = ""

    @property
    def name(self) -> str:
        """`target/layout_mask_qkDIM_vDIM[_option...]`: also the kernel's path below `generated/`, without `.py`."""
        return f"{self.target}/" + "_".join(_label(self, field) for field in _fields() if _label(self, field))

    @classmethod
    def from_name(cls, name: str) -> "KernelSpec":
        """Inverse of `name`. Raises `SpecError` that says what is wrong with the name."""
        target, _, rest = name.partition("/")
        words = rest.split("_")
        values: dict[str, Any] = {"target": _member(Target, target, name)}
        for field in _fields():
            kind: Any = field.type
            if kind is bool:
                values[field.name] = field.name in words
                words = [word for word in words if word != field.name]
            elif kind is str:
                found = [word for word in words if re.fullmatch(rf"{field.name}[0-9a-f]{{12}}", word)]
                values[field.name] = found[0].removeprefix(field.name) if found else ""
                words = [word for word in words if word not in found]
            elif not words:
                raise SpecError(f"{name!r} ends before its {field.name}; {_FORM}")
            elif kind is int:
                values[field.name] = _dim(field.name, words.pop(0), name)
            else:
                values[field.name] = _member(kind, words.pop(0), name)
        if words:
            raise SpecError(f"{name!r} has {'_'.join(words)!r} left over; {_FORM}")
        spec = cls(**values)
        if spec.name != name:
            raise SpecError(f"{name!r} is written {spec.name!r}; {_FORM}")
        return spec

    def refusal(self) -> str | None:
        """Why there is no such kernel, or None where there is one."""
        return "; ".join(self.refusals()) or None

    def refusals(self) -> list[str]:
        """Each reason why there is no such kernel."""
        reasons = []
        for field in ("qk_dim", "v_dim"):
            dim = getattr(self, field)
            if dim % 8 or not 8 <= dim <= MAX_HEAD_DIM:
                reasons.append(
                    f"{field} is {dim}; kernels exist for multiples of 8 from 8 to {MAX_HEAD_DIM}: pad the head dim with zeros "
                    "to the next multiple of 8 and pass scale=qk_dim**-0.5"
                )
        if self.layout.packed and self.qk_dim != self.v_dim:
            reasons.append(f"qk_dim is {self.qk_dim} and v_dim {self.v_dim}; a packed array has one head dim")
        if self.target is Target.GLUON_HOPPER:
            reasons += self._refusals_of_gluon()
        return reasons

    def _refusals_of_gluon(self) -> list[str]:
        reasons = []
        if self.qk_dim != self.v_dim or self.qk_dim not in (64, 128):
            reasons.append(
                f"head dims are {self.qk_dim} and {self.v_dim}; the kernels of gluon_hopper have 64 or 128 for both: "
                "implementation='triton' has others"
            )
        if self.layout.packed:
            reasons.append("query, key and value lie in one array; gluon_hopper reads separate ones, 'triton' this too")
        options = [*self.options, *(name for name in ("scoremod", "maskmod") if getattr(self, name))]
        if options:
            reasons.append(f"gluon_hopper has no kernels with {', '.join(options)} yet; 'triton' has")
        return reasons

    @property
    def options(self) -> tuple[str, ...]:
        """The names of the options that this kernel has."""
        return tuple(field.name for field in _fields() if field.type is bool and getattr(self, field.name))


_FORM = "a name reads target/layout_mask_qkDIM_vDIM[_option...], for instance triton/bshd_causal_qk128_v128_segments"


def _fields() -> list[dataclasses.Field]:
    """The fields that make the file name: all but the target, which is the folder."""
    return [field for field in dataclasses.fields(KernelSpec) if field.name != "target"]


def _label(spec: KernelSpec, field: dataclasses.Field) -> str:
    value = getattr(spec, field.name)
    if field.type is bool:
        return field.name if value else ""
    if field.type is str:
        return f"{field.name}{value}" if value else ""
    if field.type is int:
        return f"{field.name.removesuffix('_dim')}{value}"
    return str(value)


def _dim(field: str, word: str, name: str) -> int:
    match = re.fullmatch(rf"{field.removesuffix('_dim')}(\d+)", word)
    if match is None:
        raise SpecError(f"{name!r} has {word!r} where its {field} belongs; {_FORM}")
    return int(match[1])


def _member[E: enum.StrEnum](kind: type[E], word: str, name: str) -> E:
    try:
        return kind(word)
    except ValueError:
        raise SpecError(f"{name!r} has {word!r} where one of {', '.join(kind)} belongs; {_FORM}") from None


def nearest(name: str, names: Iterable[str]) -> list[str]:
    """Up to three of `names` that resemble `name` most."""
    return difflib.get_close_matches(name, list(names), n=3, cutoff=0.5)
