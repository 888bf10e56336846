"""`python -m eqx_attn.bench --static`: kernels measured by libtpu's own schedules, without a TPU."""

import argparse
import re
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .._codegen import KernelSpec
from ._static import Measured
from ._static_pool import Job, measure_all
from ._static_spec import DIRECTIONS, flops_per_pair, Overrides, products_of, share_of, spec_program, tiles_of
from ._tpu import GENERATIONS

_FIELDS = {"num_warps", "num_stages"}  # Of a tile, that mean nothing on a TPU.


def run(options: argparse.Namespace) -> int:
    """Measures, and prints a table."""
    devices = devices_of(options.static)
    if not options.spec:
        raise ValueError("--static needs --spec NAME")
    overrides = parse_tiles(options.tile)
    jobs = []
    for name in options.spec.split(","):
        spec = spec_named(name)
        for device in devices:
            tiles_of(spec, device, options.seq, overrides)  # Complains before anything is compiled.
            directions = [options.direction] if options.direction else DIRECTIONS
            jobs += [Job(spec_program, (spec.name, d, device, options.seq, overrides), device) for d in directions]
    found = dict(with_progress(jobs, options.processes))
    table = spec_table(jobs, found)
    console = Console(highlight=False)
    (console if console.is_terminal else Console(width=200, highlight=False)).print(table)
    return 1 if any(isinstance(result, str) for result in found.values()) else 0


def devices_of(text: str) -> list[str]:
    """The generations that `--static` names; all if it names none."""
    devices = text.split(",") if text else list(GENERATIONS)
    for device in devices:
        if device not in GENERATIONS:
            raise ValueError(f"--static {device}: no TPU generation of that name; known are {', '.join(GENERATIONS)}")
    return devices


def spec_named(name: str) -> KernelSpec:
    """The TPU kernel that a user's name means; the target may be left out."""
    name = name if "/" in name else f"pallas_tpu/{name}"
    try:
        spec = KernelSpec.from_name(name)
        reason = spec.refusal()
    except ValueError as error:
        spec, reason = None, str(error)
    if spec is None or reason is not None:
        raise ValueError(f"--spec {name}: {reason}")
    if spec.target != "pallas_tpu":
        raise ValueError(f"--spec {name}: --static measures pallas_tpu kernels")
    return spec


def parse_tiles(texts: list[str]) -> Overrides:
    """`["forward=2048x1024,field=2"]` as changes of tiles."""
    found = []
    for text in texts:
        match = re.fullmatch(r"(\w+)=(?:(\d+)x(\d+))?((?:,?\w+=\d+)*)", text)
        if not match:
            raise ValueError(f"--tile {text}: expected KERNEL=QxKV, such as forward=2048x1024, or KERNEL=FIELD=N")
        changes = [("block_q", int(match[2])), ("block_kv", int(match[3]))] if match[2] else []
        changes += [(name, int(value)) for name, value in re.findall(r"(\w+)=(\d+)", match[4])]
        found.append((match[1], tuple(changes)))
    return tuple(found)


def with_progress(jobs: list[Job], processes: int) -> Iterator[tuple[Job, Measured | str]]:
    """`measure_all`, with a bar on standard error."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("compiling", total=len(jobs))
        for job, result in measure_all(jobs, processes):
            progress.update(task, advance=1, description=f"{job.arguments[0]} for {job.device}")
            yield job, result


def spec_table(jobs: list[Job], found: dict[Job, Measured | str]) -> Table:
    """A row for each kernel, and one for each backward of several kernels."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("spec", "TPU", "kernel", "tile"):
        table.add_column(title, no_wrap=True)
    for title in ("VMEM MiB", "cores", "step", "masked", "set-up", "write-out", "useful", "masked", "array"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("bound", no_wrap=True)
    table.add_column("spills", justify="right", no_wrap=True)
    table.add_column("compiled in", justify="right", no_wrap=True)
    for job in jobs:
        result = found[job]
        name, direction, device, seq, overrides = job.arguments
        head = (name.removeprefix("pallas_tpu/"), device)
        if isinstance(result, str):
            table.add_row(*head, direction, f"[red]{result}[/red]")
            continue
        spec = KernelSpec.from_name(name)
        tiles = tiles_of(spec, device, seq, overrides)
        for kernel in result.kernels:
            table.add_row(*head, *_kernel_cells(kernel, device, spec, tiles), f"{result.compile_seconds:.0f} s")
        if len(result.kernels) > 1:
            flops = flops_per_pair(spec.qk_dim, spec.v_dim, direction)
            whole, masked = (share_of(result, device, flops, masked) for masked in (False, True))
            has_masked = any(kernel.steps and kernel.steps.masked for kernel in result.kernels)
            cells = ["", "", f"{whole.cycles:.0f}", f"{masked.cycles:.0f}" if has_masked else "", "", ""]
            cells += [_percent(whole.useful), _percent(masked.useful) if has_masked else ""]
            table.add_row(*head, f"[bold]{direction}, all[/bold]", "", *cells)
    return table


def _kernel_cells(kernel, device: str, spec, tiles) -> list[str]:
    vmem = f"{kernel.vmem / 2**20:.1f}"
    steps = kernel.steps
    if steps is None:
        return [kernel.name, "", vmem, *[""] * 10]
    masked = " ".join(str(step.cycles) for step in steps.masked)
    flops = products_of(kernel.name, spec.qk_dim, spec.v_dim) * kernel.pairs / GENERATIONS[device].flops_per_cycle
    return [
        kernel.name,
        _tile(kernel, tiles),
        vmem,
        "?" if kernel.cores is None else str(kernel.cores),
        f"{steps.whole.cycles}{' dynamic' if steps.whole.dynamic else ''}",
        masked,
        str(steps.set_up),
        str(steps.write_out),
        _percent(flops / steps.whole.cycles),
        " ".join(_percent(flops / step.cycles) for step in steps.masked),
        _percent(steps.whole.array),
        " ".join(f"{unit} {share:.0%}" for unit, share in _busiest(steps.whole.units)),
        str(steps.whole.spills),
    ]


def _tile(kernel, tiles) -> str:
    field = next((name for name in ("forward", "dq", "dkv", "dbias") if name in kernel.name), "backward")
    tile = getattr(tiles, field, None) or getattr(tiles, "dkv", None)
    if tile is None:
        return ""
    others = {name: value for name, value in vars(tile).items() if name not in {"block_q", "block_kv", *_FIELDS}}
    rest = "".join(f" {name}={value}" for name, value in others.items())
    return f"{tile.block_q} x {tile.block_kv}{rest}"


def _busiest(units: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(units.items(), key=lambda item: -item[1])[:2]


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"
