"""What `--tune` tries: for each target the candidates of a kernel, and for each kernel the call that times them."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, Literal

from .._codegen import KernelSpec, Layout, MaskKind
from .._operands import Tile
from ._case import BlockMap, Case

Direction = Literal["fwd", "bwd"]
DIRECTIONS: tuple[Direction, ...] = ("fwd", "bwd")
_DOCUMENTS = (512, 4096, 1024, 3000, 1096, 2560, 3072, 1024)


@dataclasses.dataclass(frozen=True)
class Sweep:
    """The tiles to try for one field of `Tiles`, a kernel of a direction, while the other fields stay as they are.

    `deterministic` is what the timed call asks for: a target may have another backward for each.
    """

    field: str
    tiles: tuple[Tile, ...]
    deterministic: bool | None = None


def candidates(spec: KernelSpec, direction: Direction) -> list[Sweep]:
    """The sweeps of a direction of a kernel. Raises ValueError where its target has none.

    A target is added with a function in `CANDIDATES`. It may name tiles that do not fit: those that do not compile, or spill
    more registers than the tiles they would replace, are passed over.
    """
    target = str(spec.target)
    if target not in CANDIDATES:
        raise ValueError(
            f"--tune {spec.name}: tiles of {target} are not found by timing; those of {', '.join(CANDIDATES)} are"
            + (", and --tune --static finds those of TPU kernels" if target == "pallas_tpu" else "")
        )
    return CANDIDATES[target](spec, direction)


def _of_triton(spec: KernelSpec, direction: Direction) -> list[Sweep]:
    dim = max(spec.qk_dim, spec.v_dim)
    wide = (32, 64) if dim > 128 else (32, 64, 128)
    if direction == "fwd":
        return [Sweep("forward", _product((64, 128), wide))]
    found = [
        Sweep("dq", _product((64, 128), wide)),
        Sweep("dkv", _product((16, 32, 64), (64,) if dim > 128 else (64, 128))),
    ]
    if spec.bias:
        found.append(Sweep("dbias", _product((64, 128), (64, 128), stages=(1, 2))))
    return found


def _product(rows: tuple[int, ...], columns: tuple[int, ...], stages: tuple[int, ...] = (2, 3)) -> tuple[Tile, ...]:
    return tuple(itertools.starmap(Tile, itertools.product(rows, columns, (4, 8), stages)))


CANDIDATES: dict[str, Callable[[KernelSpec, Direction], list[Sweep]]] = {"triton": _of_triton}


def case_of(spec: KernelSpec, scale: int = 1) -> Case:
    """The call that times a kernel: 16,384 tokens of 2,048 channels, or less by a factor of `scale`.

    Raises ValueError for kernels that `Case` has no call for.
    """
    if spec.layout not in (Layout.BSHD, Layout.QKV) or spec.dense or spec.scoremod or spec.maskmod:
        raise ValueError(
            f"--tune {spec.name}: calls are timed with the layouts bshd and qkv, without dense masks and functions; tiles for "
            "bhsd are those of bshd unless its table has others"
        )
    single = spec.segments or spec.mask is MaskKind.WINDOW
    options: dict[str, Any] = dict(
        mask="full" if spec.mask is MaskKind.FULL else "causal",
        window=1024 // scale if spec.mask is MaskKind.WINDOW else None,
        documents=tuple(length // scale for length in _DOCUMENTS) if spec.segments else (),
        v_dim=None if spec.v_dim == spec.qk_dim else spec.v_dim,
        blocks=BlockMap() if spec.blocks else None,
        bias="1hqk" if spec.bias else None,
        softcap=50.0 if spec.softcap else None,
        sinks=spec.sinks,
        dropout=0.1 if spec.dropout else 0.0,
        max_logit=spec.maxlogit,
        layout="qkv" if spec.layout is Layout.QKV else "bshd",
    )
    batch, seq = (1, 16384) if single else (4, 4096)
    return Case(batch, seq // scale, max(1, 2048 // max(spec.qk_dim, spec.v_dim)), spec.qk_dim, **options)
