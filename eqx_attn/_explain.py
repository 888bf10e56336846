"""What `attention` would do with a call, without doing it."""

import contextlib
import dataclasses
import textwrap
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import numpy as np
from beartype import beartype
from jax.core import Tracer

from ._block_states import Band, block_states, HIDDEN, MASKED, passes_of, Tokens
from ._call import Request, Route
from ._codegen import find_program, printer
from ._context import current_context, target
from ._dropout import Dropout
from ._explain_context import calls_of_devices, context_words, refusal_of_reference, TokenPair
from ._kernels import is_checked_in
from ._masks import as_mask, Full
from ._operands import SegmentOperands, Tile
from ._plan import UNBOUNDED
from ._resolve import absence, current_platforms, IMPLEMENTATIONS, reasons_against, resolve
from ._serve import operands_for, Options, prepare, sizes_of
from ._validate import check_arrays, check_scale
from .sharding._context import ContextParallel
from .sharding._place import Spread

_COLUMNS = 80  # of the report, as wide as a terminal that nobody has widened


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How many of the `total` blocks of scores of one head a kernel visits, and in how many it masks single scores.

    Counted over `examples` of the batch: 1 where the mask is the same for all. `visited` and `masked` are None where
    they depend on ids that are not known, those of a `Segments` that is traced or abstract, and with a `BlockSparse`.
    """

    visited: int | None
    masked: int | None
    total: int
    examples: int

    def __str__(self) -> str:
        if self.visited is None:
            return f"? of {self.total}, which depends on values"
        over = f" over {self.examples} examples" if self.examples > 1 else ""
        masked = f", {self.masked} of them masked" if self.masked else ""
        return f"{self.visited} of {self.total}{over}{masked}"


@dataclasses.dataclass(frozen=True)
class Pass:
    """One kernel of the call: "forward", "dq" and so on, the tile that it runs with, the blocks that it visits."""

    name: str
    tile: Tile
    blocks: Blocks


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What serves a call of `attention`; `str(...)` is a report.

    - `call`: shapes, dtype and mask, in words.
    - `device`: what the call is lowered for.
    - `implementation`: what serves it, or None where the implementation asked for cannot.
    - `kernel`: the name of the generated kernel's spec; None for "xla" and "reference", which have none.
    - `checked_in`: whether that kernel is in `generated/`; else it is rendered when the call is traced.
    - `passes`: the kernels of forward and backward.
    - `copies`: what is copied or transposed around the kernels.
    - `others`: for every other implementation why it does not serve the call, or what it would be. Where the one asked
        for cannot serve the call, it is among these, and `attention` raises with its reasons.
    - `context`: how the sequences are spread over devices, in words; None where they are not. Then `call` and `passes` are
        those of one device.
    - `functions`: of "score_mod" and of the mask's functions ("mask"), where there are any, the lines that they are in
        the kernel (in `jax.numpy` where there is no kernel).
    """

    call: str
    device: str
    implementation: str | None
    kernel: str | None
    checked_in: bool | None
    passes: tuple[Pass, ...]
    copies: str
    others: dict[str, tuple[str, ...]]
    context: str | None = None
    functions: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        lines = [("call", self.call), ("device", self.device)]
        if self.context is not None:
            lines.insert(1, ("context", self.context))
        if self.implementation is None:
            lines.append(("served by", "nothing: attention raises ValueError with the reasons below"))
        else:
            lines.append(("served by", self.implementation))
        if self.kernel is not None:
            lines.append(("kernel", f"{self.kernel} ({'checked in' if self.checked_in else 'rendered on demand'})"))
        for part in self.passes:
            lines.append(
                (part.name, f"tile {_tile_words(part.tile, self.implementation)}; blocks visited {part.blocks}")
            )
        if self.implementation is not None:
            lines.append(("copies", self.copies))
        for name, reasons in self.others.items():
            label = "or" if reasons == (_ALSO.get(name),) else "not"
            lines += [(f"{label} {name}", reason) for reason in reasons]
        width = max(len(label) for label, _ in lines)
        text = [_wrapped(f"{label:<{width}}  ", words) for label, words in lines]
        for name, printed in self.functions.items():
            text += [f"{name if number == 0 else '':<{width}}  {line}" for number, line in enumerate(printed)]
        return "\n".join(text)


def _wrapped(label: str, words: str) -> str:
    indent = " " * len(label)
    return textwrap.fill(
        words,
        _COLUMNS,
        initial_indent=label,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


@beartype
def explain(
    query,
    key,
    value,
    *,
    mask: Any = Full(),
    bias: Any = None,
    sinks: Any = None,
    softcap: float | int | None = None,
    dropout: Dropout | None = None,
    scale=None,
    layout: str = "bshd",
    implementation: str | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
    return_max_logit: bool = False,
    context: ContextParallel | None = None,
    score_mod: Any = None,
    device: str | None = None,
) -> Explanation:
    """Which kernel serves `attention` with the same arguments, with which tiles and copies, and why no other does.

    >>> import jax, jax.numpy as jnp
    >>> import eqx_attn
    >>> query = key = value = jax.ShapeDtypeStruct((2, 4096, 16, 128), jnp.bfloat16)
    >>> report = eqx_attn.explain(query, key, value, mask=eqx_attn.Causal(), device="sm_90a")
    >>> report.kernel
    'triton/bshd_causal_qk128_v128'

    Runs and compiles nothing. Where a `Segments` holds arrays with values, visited blocks are counted from them.

    **Arguments:** those of `attention`, where `jax.ShapeDtypeStruct`s may stand for arrays, and

    - `context`: as for `attention`, with the mesh of the shapes' `sharding`, of `jax.set_mesh` or `jax.sharding.use_abstract_mesh`.
    - `device`: explain the call as inside `with eqx_attn.target(device)`: "sm_80", "sm_90a", "v6e" and so on. None is
        the device that a call here would run on or be lowered for.

    **Returns:** an `Explanation`.

    **Raises:** ValueError or TypeError where the arguments do not fit one another, as `attention` does, or `device` is
    unknown. An implementation that cannot serve the call does not raise: the report has the reasons.
    """
    check_arrays(query, key, value, layout)
    check_scale(scale)
    with target(device) if device is not None else contextlib.nullcontext():
        options = Options(
            Full(),
            scale,
            bias,
            sinks,
            softcap,
            dropout,
            implementation,
            deterministic,
            return_max_logit,
            context,
            score_mod,
        )
        return _explain(query, key, value, mask, layout, options)


def _explain(query, key, value, mask, layout, options: Options) -> Explanation:
    implementation = options.implementation
    spread = Spread.of(options.context, (query, key, value))
    request, band, tokens = _planned(query, key, value, mask, layout, options, spread)
    against = {name: reasons_against(name, request) + absence(name, request) for name in IMPLEMENTATIONS}
    against["reference"] = [*against["reference"], *refusal_of_reference(spread)]
    route = None
    if not against.get(implementation or ""):  # resolve knows what to say of a name that is unknown
        call = resolve(request, implementation, warn=False)
        route = dict(call.routes).get(current_platforms()[0], call.default)
    chosen = None if route is None else route.implementation
    others = {name: tuple(reasons) or (_ALSO[name],) for name, reasons in against.items() if name != chosen}
    spec = None if route is None else route.spec
    return Explanation(
        call=_call_words(request, band),
        device=_device_words(),
        implementation=chosen,
        kernel=None if spec is None else spec.name,
        checked_in=None if spec is None else is_checked_in(spec),
        passes=() if route is None else tuple(_passes(route, request, band, list(calls_of_devices(spread, tokens)))),
        copies="none" if route is None else _copies(route, request),
        others=others,
        context=None if spread is None else context_words(spread),
        functions=_functions(request, chosen),
    )


def _functions(request: Request, implementation: str | None) -> dict[str, tuple[str, ...]]:
    language = printer.Triton if implementation == "triton" else printer.Jax
    digests = {"score_mod": request.score_mod, "mask": request.mask_mod}
    return {
        name: tuple(printer.function_lines(find_program(digest), language))
        for name, digest in digests.items()
        if digest
    }


def _planned(query, key, value, mask, layout, options, spread) -> tuple[Request, Band, tuple[Tokens, Tokens] | None]:
    """What resolution looks at, the bounds, and the tokens that the kernels get, where their values are known.

    The mask's arrays may be abstract: then nothing is computed from them.
    """
    sizes, planned = sizes_of(query, key, value, layout), []
    if spread is not None:
        spread.check(None, sizes)

    def plan(mask):
        planned.append(prepare(sizes, layout, dataclasses.replace(options, mask=as_mask(mask)), spread))
        return planned[-1][1].segments

    if all(map(_has_value, jax.tree.leaves(mask))):
        with jax.ensure_compile_time_eval():
            segments = plan(mask)
    else:
        eqx.filter_eval_shape(plan, mask)
        segments = None
    request, plan_of_mask = planned[-1]
    operands = operands_for(plan_of_mask, scale=1.0)
    return request, Band(operands.lower, operands.upper), None if segments is None else _tokens(segments)


def _tokens(segments: SegmentOperands) -> tuple[Tokens, Tokens]:
    def tokens(ids, positions):
        positions = None if positions is None else np.asarray(positions).astype(np.int64)
        return Tokens(np.maximum(np.asarray(ids).astype(np.int64), 0), positions)

    return tokens(segments.q_ids, segments.q_positions), tokens(segments.kv_ids, segments.kv_positions)


def _has_value(leaf) -> bool:
    if isinstance(leaf, jax.ShapeDtypeStruct | Tracer):
        return False
    return getattr(leaf, "is_fully_addressable", True)


def _passes(route: Route, request: Request, band: Band, devices: list[list[TokenPair | None]]) -> Iterator[Pass]:
    """`devices` are the tokens of the calls that each device makes."""
    known = "blocks" not in request.options or route.implementation == "xla"
    for name, tile in passes_of(route, request).items():
        found = []
        for calls in devices:
            states = [
                block_states(route.implementation, name, tile, request, band, x) if known else None for x in calls
            ]
            found.append(_added([_count(x, request, tile) for x in states]))
        yield Pass(name, tile, max(found, key=lambda blocks: blocks.visited or 0))


def _added(hops: list[Blocks]) -> Blocks:
    if len(hops) == 1:
        return hops[0]
    visited = [x.visited for x in hops if x.visited is not None]
    masked = [x.masked for x in hops if x.masked is not None]
    total, known = sum(x.total for x in hops), len(visited) == len(hops)
    return Blocks(sum(visited) if known else None, sum(masked) if known else None, total, hops[0].examples)


def _count(states: np.ndarray | None, request: Request, tile: Tile) -> Blocks:
    if states is None:
        total = -(-request.q_seq // tile.block_q) * -(-request.kv_seq // tile.block_kv)
        return Blocks(None, None, total * request.batch, request.batch)
    return Blocks(int((states != HIDDEN).sum()), int((states == MASKED).sum()), states.size, len(states))


_ALSO = {
    "pallas_tpu": "also serves the call",
    "triton": "also serves the call",
    "gluon_hopper": "also serves the call: on H100 and H200, faster where it does, and asked for by name until it is the default",
    "xla": "also serves the call: blockwise JAX for any device, slower than a kernel",
    "reference": "also serves the call: the oracle of the tests, in memory that grows with q_seq * kv_seq",
}


def _copies(route: Route, request: Request) -> str:
    """What lies between the caller's arrays and what the kernels read."""
    if route.implementation in ("triton", "gluon_hopper") or (
        route.implementation == "pallas_tpu" and request.layout == "bhsd"
    ):
        return "none"
    if route.implementation != "pallas_tpu":
        return (
            "none of its own: transposes and padding are XLA's to fuse"
            if route.implementation == "xla"
            else "the dense scores"
        )
    if request.qk_dim % 128 or request.v_dim % 128:
        return (
            "query, key, value (and dout) are transposed to bhsd before the kernels and results back, since a head dim "
            "that is no multiple of 128 does not lie on the TPU's lanes; layout='bhsd' needs none"
        )
    return (
        "none but the reshape to [batch, seq, heads * dim], which moves data unless the producer is a 2-d product; "
        "backward, lse and the sums of out * dout too, numbers of a query and head"
    )


def _call_words(request: Request, band: Band) -> str:
    def shape(seq, heads, dim):
        order = (seq, heads, dim) if request.layout == "bshd" else (heads, seq, dim)
        return f"[{','.join(map(str, (request.batch, *order)))}]"

    arrays = (
        f"query {shape(request.q_seq, request.q_heads, request.qk_dim)}, "
        f"key {shape(request.kv_seq, request.kv_heads, request.qk_dim)}, "
        f"value {shape(request.kv_seq, request.kv_heads, request.v_dim)}"
    )
    bounds = "no bound on positions"
    if request.mask != "full":
        lower = "" if band.lower is None else f"{band.lower} <= "
        upper = "" if band.upper in (None, UNBOUNDED) else f" <= {band.upper}"
        bounds = f"{lower}key position - query position{upper}"
    extra = "".join(f", {_OPTION_WORDS[option]}" for option in request.options)
    extra += ", a function" if request.mask_mod else ""
    extra += ", with a score function" if request.score_mod else ""
    return f"{request.layout} {request.dtype}, {arrays}; mask: {bounds}{extra}"


_OPTION_WORDS = dict(
    segments="segments",
    blocks="a map of blocks",
    dense="a boolean array",
    bias="with a bias",
    softcap="with a softcap",
    sinks="with sinks",
    dropout="with dropout",
    maxlogit="with the largest score",
)


def _device_words() -> str:
    context = current_context()
    name = (
        f"{context.targets[0]} (lowered for it)"
        if context.targets
        else f"{jax.default_backend()} (the default backend)"
    )
    return name + (", interpreted on the CPU" if context.interpreting else "")


def _tile_words(tile: Tile, implementation: str | None) -> str:
    words = f"{tile.block_q} x {tile.block_kv}"
    return (
        f"{words}, {tile.num_warps} warps, {tile.num_stages} stages"
        if implementation in ("triton", "gluon_hopper")
        else words
    )
