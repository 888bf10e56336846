"""Which implementation serves a call, and why the others do not."""

import importlib.util
import warnings

import jax

from ._call import Call, Request, Route
from ._codegen import find_program, KernelSpec, mod_reads, Target
from ._context import current_context, platform_of
from ._tuning import compiled_capability, default_tiles, XLA_TILE

IMPLEMENTATIONS = ("pallas_tpu", "triton", "gluon_hopper", "xla", "reference")

_PLATFORMS = {"triton": "cuda", "gluon_hopper": "cuda", "pallas_tpu": "tpu"}
_DEFAULTS = {"cuda": "triton", "tpu": "pallas_tpu"}
_DEVICES = {"cuda": "an NVIDIA GPU", "tpu": "a TPU"}
_TARGET_EXAMPLES = {"cuda": "sm_90a", "tpu": "v6e"}
_KERNEL_DTYPES = {
    "triton": ("float16", "bfloat16", "float32"),
    "gluon_hopper": ("float16", "bfloat16"),
    "pallas_tpu": ("bfloat16", "float32"),
}


def resolve(request: Request, implementation: str | None, warn: bool = True) -> Call:
    """The call for `request`: the implementation asked for, or the fastest that each platform has.

    Raises ValueError with each reason where the implementation asked for cannot serve the request. Warns, once for each
    reason, where the default choice on an accelerator falls back to `xla`; not so for a report (`warn=False`).
    """
    context = current_context()
    xla = Route("xla", None, XLA_TILE)
    if implementation is None:
        return Call(request.layout, xla, _default_routes(request, warn), context)
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation is {implementation!r}: it is one of {', '.join(IMPLEMENTATIONS)}, or None for the fastest that "
            "serves the call"
        )
    reasons = reasons_against(implementation, request) + absence(implementation, request)
    if reasons:
        raise ValueError(
            f"implementation={implementation!r} cannot serve this call:\n"
            + "\n".join(f"- {reason}" for reason in reasons)
            + "\nimplementation=None takes the fastest that can; eqx_attn.explain(...) with the same arguments reports on all."
        )
    if implementation in ("xla", "reference"):
        return Call(request.layout, Route(implementation, None, XLA_TILE), (), context)
    return Call(request.layout, kernel_route(implementation, request), (), context)


def kernel_route(implementation: str, request: Request) -> Route:
    """The route through a generated kernel, with its default tiles."""
    spec = request.spec(Target(implementation))
    return Route(implementation, spec, default_tiles(spec, request.dtype, request.q_seq, request.kv_seq))


def reasons_against(implementation: str, request: Request) -> list[str]:
    """Why `implementation` cannot compute the request on any device; empty where it can."""
    if implementation in ("xla", "reference"):
        return []
    reasons = []
    dtypes = _KERNEL_DTYPES[implementation]
    if request.dtype not in dtypes:
        reasons.append(
            f"query, key and value are {request.dtype}; the kernels of {implementation} compute in {', '.join(dtypes)}: "
            "cast the three arrays"
        )
    if implementation == "pallas_tpu":
        reasons += _reasons_of_functions(request)
    return reasons + request.spec(Target(implementation)).refusals()


def _reasons_of_functions(request: Request) -> list[str]:
    """Why TPU kernels do not have the request's functions."""
    programs = [find_program(digest) for digest in (request.score_mod, request.mask_mod) if digest]
    reasons = [reason for program in programs for reason in mod_reads.refusals(program)]
    if request.dealt and any(map(mod_reads.reads_by_distance, programs)):
        reasons.append(
            "score_mod or Mask.from_function reads an array by the distance of query and key, and the tokens are not in "
            'order: on TPUs use ContextParallel(..., order="contiguous")'
        )
    return reasons


def absence(implementation: str, request: Request) -> list[str]:
    """Why `implementation` cannot run or be lowered here: the device, an interpreter or a package is missing."""
    if implementation in ("xla", "reference"):
        return []
    context = current_context()
    if _PLATFORMS[implementation] == "cuda" and importlib.util.find_spec("triton") is None:
        return ["Triton is not installed: pip install 'eqx_attn[cuda]'"]
    if context.interpreting:
        if implementation == "gluon_hopper":
            return ["Gluon, its language, has no interpreter: implementation='triton' has one"]
        if implementation == "triton" and request.dtype == "bfloat16":
            return [
                "Triton's interpreter computes bfloat16 products wrongly: use float16 or float32 inside interpret()"
            ]
        return []
    platform = _PLATFORMS[implementation]
    if platform in current_platforms():
        return _other_gpu() if implementation == "gluon_hopper" else []
    where = (
        f"target({context.targets[0]!r})"
        if context.targets
        else f"this process's default backend ({jax.default_backend()})"
    )
    return [
        f"it needs {_DEVICES[platform]}, and {where} is none: use `with eqx_attn.interpret():` to run it on the CPU, or "
        f'`with eqx_attn.target("{_TARGET_EXAMPLES[platform]}"):` to lower for a device that is not here'
    ]


def _other_gpu() -> list[str]:
    """Why the GPU that is compiled for has no kernels for Hopper; empty where it is one."""
    found = compiled_capability()
    if found == 90:
        return []
    return [f"it needs an NVIDIA GPU of capability 9.0 (H100, H200), and this one has {found / 10}: use 'triton'"]


def current_platforms() -> tuple[str, ...]:
    """The platforms that calls are lowered for: those of the targets, or "cuda", "tpu", or another of JAX's names."""
    targets = current_context().targets
    if targets:
        return tuple(platform_of(name) for name in targets)
    backend = jax.default_backend()
    if backend != "gpu":
        return (backend,)
    return ("rocm" if "rocm" in jax.devices()[0].client.platform_version.lower() else "cuda",)


def _default_routes(request: Request, warn: bool) -> tuple[tuple[str, Route], ...]:
    """The kernels that serve the request, by platform. Says once why the present platform has none."""
    routes = []
    for platform, implementation in _DEFAULTS.items():
        reasons = reasons_against(implementation, request)
        if implementation == "triton" and importlib.util.find_spec("triton") is None:
            reasons.append("Triton is not installed: pip install 'eqx_attn[cuda]'")
        if not reasons:
            routes.append((platform, kernel_route(implementation, request)))
        elif warn and platform in current_platforms():
            for reason in reasons:
                warn_once(f"eqx_attn.attention runs on 'xla', which is slower than {implementation}: {reason}")
    return tuple(routes)


_warned: set[str] = set()


def warn_once(message: str) -> None:
    """A warning that is given once in a process."""
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, stacklevel=5)


def describe_spec(spec: KernelSpec) -> str:
    """The spec's name and where its kernel comes from, for reports."""
    from ._kernels import is_checked_in

    return f"{spec.name} ({'checked in' if is_checked_in(spec) else 'rendered on demand'})"
