"""Sequences over several GPUs against one GPU at half the tokens: throughput, exposed communication, memory."""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding
from rich.table import Table

from .._attention import attention
from ..sharding import _ring
from ..sharding._context import ContextParallel, OrderName, Strategy
from ._environment import commit, device_kind, versions

DIRECTIONS = ("forward", "forward and backward")


@dataclasses.dataclass(frozen=True)
class ContextCase:
    """Causal self-attention of one sequence of `tokens` on all devices."""

    tokens: int
    strategy: Strategy
    order: OrderName
    heads: int = 16
    head_dim: int = 128
    dtype: str = "bfloat16"

    def flops(self, direction: str, tokens: int) -> float:
        """Of visible scores: 4 operations per score and channel forward, 10 backward."""
        forward = 4.0 * self.heads * self.head_dim * tokens * (tokens + 1) / 2
        return forward if direction == "forward" else 3.5 * forward


_WAYS: list[tuple[Strategy, OrderName]] = [
    ("ring", "contiguous"),
    ("ring", "dual_chunk"),
    ("ring", "striped"),
    ("all_gather", "contiguous"),
    ("all_gather", "dual_chunk"),
]
CASES = {
    "context": [ContextCase(tokens, *way) for tokens in (32768, 131072) for way in _WAYS],
    "context_smoke": [ContextCase(128, *way, heads=2, head_dim=16, dtype="float32") for way in _WAYS],
}


def run(group: str, repeats: int, given_commit: str | None) -> dict[str, Any]:
    """Times all cases of a group on all devices; returns what the JSON file holds.

    Raises ValueError where there is one device only.
    """
    devices = jax.devices()
    if len(devices) < 2:
        raise ValueError(f"--cases {group} needs several devices, and there is {len(devices)}")
    rows, alone = [], {}
    for case in CASES[group]:
        if case.tokens not in alone:
            alone[case.tokens] = [
                _timed(case, case.tokens // 2, SingleDeviceSharding(devices[0]), None, d, repeats) for d in DIRECTIONS
            ]
        mesh = jax.make_mesh((len(devices),), ("context",), axis_types=(AxisType.Explicit,))
        sharding = NamedSharding(mesh, PartitionSpec(None, "context"))
        context = ContextParallel("context", case.strategy, case.order)
        for direction, (seconds_alone, memory_alone) in zip(DIRECTIONS, alone[case.tokens], strict=True):
            seconds, memory = _timed(case, case.tokens, sharding, context, direction, repeats)
            rate = case.flops(direction, case.tokens) / seconds
            row = dict(dataclasses.asdict(case), direction=direction, milliseconds=1e3 * seconds, tflops=1e-12 * rate)
            row["one_device_tflops"] = 1e-12 * case.flops(direction, case.tokens // 2) / seconds_alone
            row["speedup"] = row["tflops"] / row["one_device_tflops"]
            row |= dict(memory_bytes=memory, one_device_memory_bytes=memory_alone)
            if case.strategy == "ring":
                # The same kernels on keys that stay where they are: what is longer with them moving is exposed.
                with mock.patch.object(_ring, "_sent", lambda placement, tree, shift: tree):
                    still, _ = _timed(case, case.tokens, sharding, context, direction, repeats)
                row["exposed"] = max(0.0, 1 - still / seconds)
            rows.append(row)
    return {
        "device": f"{len(devices)} x {device_kind()}",
        "versions": versions(),
        "commit": commit(given_commit),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "repeats": repeats,
        "rows": rows,
    }


def _timed(case: ContextCase, tokens: int, where, context, direction: str, repeats: int) -> tuple[float, int | None]:
    """Median seconds of a call, and the bytes of temporaries and results that the program has on each device."""
    jax.clear_caches()  # the traces of a call do not say what is patched
    shape = (1, tokens, case.heads, case.head_dim)
    make = jax.jit(lambda key: jax.random.normal(key, shape, case.dtype), out_shardings=where)
    arrays = [make(key) for key in jax.random.split(jax.random.key(0), 4)]

    def forward(query, key, value, dout):
        del dout
        return attention(query, key, value, mask="causal", context=context)

    def both(query, key, value, dout):
        out, pull_back = jax.vjp(lambda *x: attention(*x, mask="causal", context=context), query, key, value)
        return out, pull_back(dout)

    function: Callable = forward if direction == "forward" else both
    compiled = jax.jit(function).lower(*arrays).compile()
    analysis = compiled.memory_analysis()
    memory = None if analysis is None else analysis.temp_size_in_bytes + analysis.output_size_in_bytes
    jax.block_until_ready(compiled(*arrays))
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        calls = [compiled(*arrays) for _ in range(3)]
        jax.block_until_ready(calls)
        seconds.append((time.perf_counter() - started) / len(calls))
    return statistics.median(seconds), memory


def table(results: dict[str, Any]) -> Table:
    """The rows for a terminal."""
    title = f"{results['device']}, jax {results['versions'].get('jax')}, commit {results['commit'][:12]}"
    shown = Table(title=title, box=None, header_style="bold", pad_edge=False)
    figures = dict(milliseconds=".3f", tflops=".1f", one_device_tflops=".1f", speedup=".2f", exposed=".1%")
    for heading in ("tokens", "strategy", "order", "direction", *figures, "MiB a device"):
        shown.add_column(heading, justify="right" if heading in figures else "left", no_wrap=True)
    for row in results["rows"]:
        words = ("-" if row.get(key) is None else format(row[key], how) for key, how in figures.items())
        memory = "-" if row["memory_bytes"] is None else f"{row['memory_bytes'] / 2**20:.0f}"
        shown.add_row(str(row["tokens"]), row["strategy"], row["order"], row["direction"], *words, memory)
    return shown
