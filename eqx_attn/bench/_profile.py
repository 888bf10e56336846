"""How long a GPU was busy with each of several computations, from JAX's profiler.

All computations of a repeat share one trace, with a pause before each. Busy times are told apart by those pauses, so
that nothing depends on how XLA names its kernels.
"""

import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax

_PAUSE = 0.030
_GAP_NS = 15e6  # Longer than any gap between two calls that are enqueued one after the other.


def busy_times(runs: Sequence[Callable[[], Any]], calls: Sequence[int]) -> list[float] | None:
    """For each of `runs`, which return arrays without waiting for them, the busy seconds of one call.

    None where the profiler tells nothing of a GPU, or not as many busy times as there are runs.
    """
    with tempfile.TemporaryDirectory(prefix="eqx_attn_bench_") as folder:
        try:
            jax.profiler.start_trace(folder, profiler_options=_options())
            try:
                for run, count in zip(runs, calls, strict=True):
                    time.sleep(_PAUSE)
                    _repeat(run, count)
            finally:
                jax.profiler.stop_trace()
            files = sorted(Path(folder).rglob("*.xplane.pb"))
            groups = [] if not files else busy_groups(jax.profiler.ProfileData.from_file(str(files[-1])))
        except (RuntimeError, ValueError):
            return None
    if len(groups) != len(runs):
        return None
    return [1e-9 * busy / count for busy, count in zip(groups, calls, strict=True)]


def wall_times(runs: Sequence[Callable[[], Any]], calls: Sequence[int]) -> list[float]:
    """The seconds of one call by the clock, with what it costs to launch."""
    found = []
    for run, count in zip(runs, calls, strict=True):
        started = time.perf_counter()
        _repeat(run, count)
        found.append((time.perf_counter() - started) / count)
    return found


def _repeat(run: Callable[[], Any], count: int) -> None:
    result = None
    for _ in range(count):
        result = run()
    jax.block_until_ready(result)


def _options() -> Any:
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = 0
    options.python_tracer_level = 0
    return options


def busy_groups(data: Any) -> list[float]:
    """Nanoseconds that the first GPU was busy between pauses, in the order of time.

    Kernels and what they need of fills and copies on the device count; copies from and to the host do not. Where two
    streams work at once the time counts once.
    """
    intervals = sorted(
        (event.start_ns, event.start_ns + event.duration_ns)
        for plane in data.planes
        if plane.name == "/device:GPU:0"
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
        if not event.name.startswith(("MemcpyH2D", "MemcpyD2H"))
    )
    return _merge(intervals)


def _merge(intervals: Iterable[tuple[float, float]]) -> list[float]:
    groups: list[float] = []
    until = float("-inf")
    for start, end in intervals:
        if start - until > _GAP_NS:
            groups.append(0.0)
        groups[-1] += max(0.0, end - max(start, until))
        until = max(until, end)
    return groups
