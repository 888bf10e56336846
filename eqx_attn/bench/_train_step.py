"""A training step of the demo's model, scaled up: this package's attention against equinox's with a dense mask."""

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from rich.table import Table

from ..demo._model import GPT
from ..demo._train import OPTIMISER, train_step
from ._environment import commit, device_kind, versions

LAYERS = {"eqx_attn": "eqx_attn.nn.MultiheadAttention", "equinox": "equinox.nn.MultiheadAttention, dense mask"}


@dataclasses.dataclass(frozen=True)
class Size:
    """One row of `length` tokens in packed documents; width / heads is the head dim."""

    length: int = 8192
    width: int = 1024
    depth: int = 12
    heads: int = 8
    steps: int = 10
    dtype: str = "bfloat16"


class EquinoxAttention(eqx.Module):
    """Equinox's layer with rotary embedding, in the place of `eqx_attn.nn.MultiheadAttention`."""

    mha: eqx.nn.MultiheadAttention
    rope: eqx.nn.RotaryPositionalEmbedding

    def __call__(self, query: Array, key: Array, value: Array, mask: Array) -> Array:
        """`[seq, width]` each, `mask` boolean `[seq, seq]`."""
        rope = jax.vmap(self.rope, in_axes=1, out_axes=1)
        return self.mha(query, key, value, mask, process_heads=lambda q, k, v: (rope(q), rope(k), v))


def _equinox_attention(width: int, num_heads: int, num_kv_heads: int, key: Array) -> EquinoxAttention:
    assert num_kv_heads == num_heads
    rope = eqx.nn.RotaryPositionalEmbedding(width // num_heads)
    return EquinoxAttention(eqx.nn.MultiheadAttention(num_heads, width, key=key), rope)


def _dense_mask(segment_ids: Array) -> Array:
    return jnp.tril(segment_ids[:, None] == segment_ids[None, :])


def run(size: Size, given_commit: str | None) -> dict[str, Any]:
    """Measures both layers, each in a process of its own, so that each has its own peak of memory."""
    found = {name: _measure_apart(name, size) for name in LAYERS}
    ours, theirs = found["eqx_attn"], found["equinox"]
    known = "seconds" in ours and "seconds" in theirs
    return {
        "device": device_kind(),
        "versions": versions(),
        "commit": commit(given_commit),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "size": dataclasses.asdict(size),
        "layers": found,
        "speed_up": theirs["seconds"] / ours["seconds"] if known else None,
    }


def _measure_apart(name: str, size: Size) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="eqx_attn_bench_") as folder:
        output = Path(folder) / "measured.json"
        arguments = [f"--{key}={value}" for key, value in dataclasses.asdict(size).items()]
        command = [sys.executable, "-m", __name__, name, str(output), *arguments]
        environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True)
        if done.returncode == 0:
            return json.loads(output.read_text())
    lines = [line for line in done.stderr.splitlines() if "Error" in line or "RESOURCE_EXHAUSTED" in line]
    return {"error": (lines or done.stderr.splitlines() or ["no message"])[-1][:300]}


def measure(name: str, size: Size) -> dict[str, Any]:
    """Median seconds of a step after warming up, peak bytes, and the losses, in this process."""
    options: dict[str, Any] = {}
    if name == "equinox":
        options = dict(attention=_equinox_attention, make_mask=_dense_mask)
    model = GPT(256, size.width, size.depth, size.heads, **options, key=jax.random.key(0))
    state = OPTIMISER.init(eqx.filter(model, eqx.is_inexact_array))
    batch = (*_rows(size.length), jnp.float32(1e-4), size.dtype)
    losses, seconds = [], []
    for _ in range(size.steps + 2):
        started = time.perf_counter()
        loss, model, state = jax.block_until_ready(train_step(batch, model, state))
        seconds.append(time.perf_counter() - started)
        losses.append(float(loss))
    stats = jax.local_devices()[0].memory_stats() or {}
    return {
        "seconds": statistics.median(seconds[2:]),
        "compilation_seconds": seconds[0],
        "peak_bytes": stats.get("peak_bytes_in_use"),
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }


def _rows(length: int) -> tuple[Array, Array]:
    """Random bytes in one row, packed documents of an eighth of the row on average; the step drops one token."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, 256, (1, length + 1), dtype=np.int32)
    starts = np.zeros(length + 1, np.int32)
    starts[random.choice(np.arange(1, length), 7, replace=False)] = 1
    return jnp.asarray(tokens), jnp.asarray(1 + np.cumsum(starts, dtype=np.int32)[None])


def table(results: dict[str, Any]) -> Table:
    """Both layers for a terminal."""
    size = results["size"]
    title = f"{results['device']}: a step of {size['depth']} layers of width {size['width']}, {size['length']} tokens"
    shown = Table(title=title, box=None, header_style="bold", pad_edge=False)
    for heading in ("layer", "ms a step", "peak memory", "first loss", "last loss"):
        shown.add_column(heading, justify="left" if heading == "layer" else "right", no_wrap=True)
    for name, found in results["layers"].items():
        if "error" in found:
            shown.add_row(LAYERS[name], "failed", "", "", "")
            continue
        peak = "-" if found["peak_bytes"] is None else f"{found['peak_bytes'] / 2**30:.1f} GiB"
        losses = (f"{found[key]:.4f}" for key in ("first_loss", "last_loss"))
        shown.add_row(LAYERS[name], f"{1e3 * found['seconds']:.1f}", peak, *losses)
    speed_up = results["speed_up"]
    shown.caption = "" if speed_up is None else f"{speed_up:.2f} times as fast"
    return shown


def _main() -> None:
    name, output, *arguments = sys.argv[1:]
    given = dict(argument.removeprefix("--").split("=") for argument in arguments)
    values: dict[str, Any] = {key: value if key == "dtype" else int(value) for key, value in given.items()}
    size = Size(**values)
    Path(output).write_text(json.dumps(measure(name, size)))


if __name__ == "__main__":
    _main()
