"""The cases of `--cases hopper`, and the speeds, relative to a peer's in the same run, that each is to reach."""

import dataclasses
from typing import NamedTuple

from ._case import Case
from ._cases import CASES

# Up to the packed documents the shapes of "triton". The sinks' shape is that of gpt-oss, the bias' that of a vision model
# with relative positions, the softcap's that of Gemma 2. Then what has no bar but cuDNN's own time: short and odd lengths.
HOPPER = {name.replace("_", "-"): case for name, case in CASES.items()} | {
    "bias-4k": Case(1, 4096, 16, 128, mask="full", bias="1hqk"),
    "softcap-8k": Case(2, 8192, 8, 256, softcap=50.0),
    "mla-causal-4k": Case(4, 4096, 16, 192, v_dim=128),
    "sinks-window-8k": Case(2, 8192, 64, 64, kv_heads=8, window=128, sinks=True),
    "short-512": Case(32, 512, 16, 128),
    "odd-1023": Case(1, 1023, 16, 128),
    "decode-8k": Case(8, 16, 16, 128, kv_seq=8192, mask="full"),
}
# Small enough for a CPU: they show that the program works.
HOPPER_SMOKE = {
    "smoke-causal": Case(1, 96, 4, 16, kv_heads=2, dtype="float32"),
    "smoke-decode": Case(2, 3, 2, 32, kv_seq=40, v_dim=16, mask="full", dtype="float32"),
    "smoke-packed": Case(1, 96, 2, 16, documents=(30, 50, 16), dtype="float32"),
}
HOPPER_GROUPS = {"hopper": HOPPER, "hopper_smoke": HOPPER_SMOKE}


class Bar(NamedTuple):
    """At least how many times a peer's speed; the deterministic backward's bar is of cuDNN's default, where it has one."""

    forward: float
    backward: float
    deterministic: float | None = None
    peer: str = "cudnn"


BARS = {
    "hd128-full-4k": Bar(1.05, 1.05, 0.93),
    "hd128-causal-4k": Bar(1.12, 1.06, 0.93),
    "hd128-full-16k": Bar(1.06, 1.07, 0.93),
    "hd128-causal-16k": Bar(1.13, 1.06, 0.93),
    "hd64-full-4k": Bar(1.12, 1.10, 0.93),
    "hd64-causal-4k": Bar(1.07, 1.14, 0.93),
    "hd256-full-4k": Bar(1.08, 1.17, 1.15),
    "hd256-causal-4k": Bar(1.19, 1.17, 1.15),
    "gqa-causal-8k": Bar(1.11, 1.12),
    "window-16k": Bar(1.00, 1.05),
    "packed-16k": Bar(0.95, 0.95, peer="fa3"),
    "bias-4k": Bar(1.5, 1.7),
    "softcap-8k": Bar(0.90, 2.5, peer="tokamax"),
    "short-512": Bar(0.9, 0.9),
    "odd-1023": Bar(0.9, 0.9),
    "decode-8k": Bar(0.9, 0.9),
}


def select_hopper(group: str, only: str | None) -> dict[str, Case]:
    """The cases of a group, or those of the comma-separated list `only`. Raises ValueError for an unknown one."""
    cases = HOPPER_GROUPS[group]
    if only is None:
        return dict(cases)
    names = [name.strip() for name in only.split(",") if name.strip()]
    for name in names:
        if name not in cases:
            raise ValueError(f"--only {name}: --cases {group} has no such case; it has {', '.join(cases)}")
    if not names:
        raise ValueError("--only names no case")
    return {name: cases[name] for name in names}


def sizes(case: Case) -> tuple[int, int]:
    """The larger head dim and the larger length: what the bound of a result's rounding error depends on."""
    return max(case.head_dim, case.v_dim or 0), max(case.seq, case.kv_seq or 0)


def described(cases: dict[str, Case]) -> dict[str, dict]:
    """The cases as JSON has them, what is left at its default left out."""
    defaults = {field.name: field.default for field in dataclasses.fields(Case)}
    return {
        name: {key: value for key, value in dataclasses.asdict(case).items() if value != defaults[key]}
        for name, case in cases.items()
    }
