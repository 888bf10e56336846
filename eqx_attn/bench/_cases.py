"""The named cases, in groups."""

import fnmatch

from ._case import BlockMap, Case

# The shapes of the project's table of published kernels, so that figures can be compared with it.
CASES = {
    "hd128_full_4k": Case(4, 4096, 16, 128, mask="full"),
    "hd128_causal_4k": Case(4, 4096, 16, 128),
    "hd128_full_16k": Case(1, 16384, 16, 128, mask="full"),
    "hd128_causal_16k": Case(1, 16384, 16, 128),
    "hd64_full_4k": Case(4, 4096, 32, 64, mask="full"),
    "hd64_causal_4k": Case(4, 4096, 32, 64),
    "hd256_full_4k": Case(4, 4096, 8, 256, mask="full"),
    "hd256_causal_4k": Case(4, 4096, 8, 256),
    "gqa_causal_8k": Case(2, 8192, 32, 128, kv_heads=8),
    "window_16k": Case(1, 16384, 16, 128, window=1024),
    "packed_16k": Case(1, 16384, 16, 128, documents=(512, 4096, 1024, 3000, 1096, 2560, 3072, 1024)),
}
# Each feature alone, on one shape.
FEATURES = {
    "dense_causal": Case(4, 4096, 16, 128),
    "window_512": Case(4, 4096, 16, 128, window=512),
    "documents_512": Case(4, 4096, 16, 128, documents=(512,) * 8),
    "block_sparse": Case(4, 4096, 16, 128, blocks=BlockMap(128, 0.5)),
    "prefix_lm_1024": Case(4, 4096, 16, 128, prefix=1024),
    "chunked_1024": Case(4, 4096, 16, 128, chunk=1024),
    "dilated_4": Case(4, 4096, 16, 128, dilation=4),
    "softcap": Case(4, 4096, 16, 128, softcap=30.0),
    "sinks": Case(4, 4096, 16, 128, sinks=True),
    "dropout": Case(4, 4096, 16, 128, dropout=0.1),
    "bias_heads": Case(4, 4096, 16, 128, bias="1hqk"),
    "bias_keys": Case(4, 4096, 16, 128, bias="b11k"),
    "return_lse": Case(4, 4096, 16, 128, lse=True),
    "max_logit": Case(4, 4096, 16, 128, max_logit=True),
    "qkv_fused": Case(4, 4096, 16, 128, layout="qkv"),
    "gqa_4": Case(4, 4096, 16, 128, kv_heads=4),
}
# Small enough for a CPU: they show that the program works, not how fast anything is.
SMOKE = {
    "smoke_causal": Case(1, 96, 4, 16, kv_heads=2, dtype="float32"),
    "smoke_window": Case(1, 96, 2, 16, window=20, dtype="float32"),
    "smoke_packed": Case(1, 96, 2, 16, documents=(30, 50, 16), dtype="float32"),
    "smoke_masks": Case(2, 96, 2, 16, blocks=BlockMap(16), chunk=48, dilation=2, layout="qkv", dtype="float32"),
    "smoke_prefix": Case(1, 96, 2, 16, prefix=20, lse=True, dtype="float32"),
    "smoke_bias": Case(2, 96, 2, 16, bias="b11k", dtype="float32"),
    "smoke_options": Case(
        2, 96, 2, 16, bias="1hqk", sinks=True, softcap=2.0, dropout=0.1, lse=True, max_logit=True, dtype="float32"
    ),
}
GROUPS = {"triton": CASES, "features": FEATURES, "smoke": SMOKE}
_KNOWN = {name: case for group in GROUPS.values() for name, case in group.items()}


def baseline_of(name: str) -> Case | None:
    """The case that a case's cost is told against: our dense causal kernel, where the case is a feature."""
    if name in ("smoke_masks", "smoke_options"):
        return SMOKE["smoke_causal"]
    return FEATURES["dense_causal"] if name in FEATURES else None


def select(names: str) -> dict[str, Case]:
    """The cases of a comma-separated list of names, shell patterns and groups. Raises ValueError for an unknown one."""
    found: dict[str, Case] = {}
    for name in filter(None, (part.strip() for part in names.split(","))):
        matching = GROUPS.get(name) or {key: _KNOWN[key] for key in fnmatch.filter(_KNOWN, name)}
        if not matching:
            raise ValueError(
                f"--cases {name} is unknown; there are the groups {', '.join(GROUPS)} and {', '.join(_KNOWN)}"
            )
        found |= matching
    if not found:
        raise ValueError("--cases names no case")
    return found
