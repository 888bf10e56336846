"""Compiling kernels with the devices' own compilers, without the devices: what `--verify` does.

The only part of codegen that needs `eqx_attn` and JAX. Each compilation runs in a worker process, so that JAX starts
there, and with the environment that libtpu wants.
"""

import concurrent.futures
import dataclasses
import importlib.metadata
import importlib.util
import multiprocessing
import os
import tempfile
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from .files import generated_folder
from .matrix import checked_in
from .records import COMPILED
from .render import body_digest, render
from .spec import KernelSpec, Target
from .tables import console

WITHOUT_PRODUCTS = ("statistics_kernel",)
"""Kernels that have no use for tensor cores."""


class CannotVerify(Exception):
    """A compiler is not installed, or there is nothing of this kind to compile."""


@dataclasses.dataclass(frozen=True)
class Platform:
    """Whose compiler, for which device kinds, and which figures of a compiled kernel it tells.

    With `wide`, the table has a column for each device, with all figures.
    """

    targets: tuple[Target, ...]
    devices: tuple[str, ...]
    packages: tuple[str, ...]  # the compiler first
    extra: str
    figures: dict[str, str]
    environment: dict[str, str]
    wide: bool


PLATFORMS = {
    "tpu": Platform(
        targets=(Target.PALLAS_TPU,),
        devices=("v4", "v5e", "v5p", "v6e", "7x"),
        packages=("libtpu", "jax"),
        extra="tpu",
        figures={"vmem": "VMEM", "cycles": "cycles", "useful": "MXU"},
        environment={
            "JAX_PLATFORMS": "cpu",
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "TPU_ACCELERATOR_TYPE": "v6e-4",  # Whatever it is, libtpu no longer complains that there is no TPU.
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "TPU_STDERR_LOG_LEVEL": "3",
            "TPU_MIN_LOG_LEVEL": "3",
        },
        wide=True,
    ),
    "cuda": Platform(
        targets=(Target.TRITON, Target.GLUON_HOPPER),
        devices=("sm_80", "sm_90a", "sm_100"),
        packages=("triton", "jax", "jax_cuda13_plugin"),
        extra="cuda",
        figures={
            "registers": "registers",
            "shared": "shared memory",
            "spill": "spill",
            "tensor_core": "tensor cores",
        },
        environment={"JAX_PLATFORMS": "cpu"},
        wide=False,
    ),
}


@dataclasses.dataclass(frozen=True)
class Compiled:
    """One spec compiled for one device: figures per kernel (bytes where they are sizes), or why that failed."""

    kernels: dict[str, dict[str, int | str]] = dataclasses.field(default_factory=dict)
    error: str = ""

    @property
    def faults(self) -> list[str]:
        """What must not happen with the default tile sizes."""
        if self.error:
            return [self.error]
        spills = [
            f"{name} spills {figures['spill']} bytes" for name, figures in self.kernels.items() if figures.get("spill")
        ]
        idle = [
            f"{name} has no tensor-core instruction"
            for name, figures in self.kernels.items()
            if figures.get("tensor_core") == "" and name not in WITHOUT_PRODUCTS
        ]
        return spills + idle


def unrecorded(specs: list[KernelSpec], platform: str) -> list[KernelSpec]:
    """Those of `specs` that `platform` compiles and whose present text is not recorded for all of its devices."""
    entries, wanted = COMPILED.read(generated_folder()), PLATFORMS[platform]
    return [spec for spec in specs if spec.target in wanted.targets and unrecorded_devices(spec, wanted, entries)]


def unrecorded_devices(spec: KernelSpec, platform: Platform, entries: dict[str, dict]) -> list[str]:
    """The platform's devices for which `entries` of COMPILED.json do not have the present text of `spec`."""
    recorded = COMPILED.lookup(entries, spec.name, body_digest(render(spec)))
    return [device for device in devices_of(spec, platform) if device not in recorded]


def devices_of(spec: KernelSpec, platform: Platform) -> tuple[str, ...]:
    """The platform's devices that a kernel is for: one for Hopper is for no other."""
    return ("sm_90a",) if spec.target is Target.GLUON_HOPPER else platform.devices


def verify_specs(specs: list[KernelSpec], platform: str, devices: tuple[str, ...], record: bool) -> int:
    """Compiles `specs`, forward and backward, for `devices` (all of the platform if empty), and prints a table.

    Returns 1 if a compilation failed or a kernel spills, else 0. With `record`, notes what compiled in `COMPILED.json`.
    """
    chosen = PLATFORMS[platform]
    devices = devices or chosen.devices
    if unknown := set(devices) - set(chosen.devices):
        raise CannotVerify(
            f"--device {sorted(unknown)[0]} is unknown; --platform {platform} has {', '.join(chosen.devices)}"
        )
    specs = [spec for spec in specs if spec.target in chosen.targets]
    if not specs:
        raise CannotVerify(
            f"--platform {platform} compiles {', '.join(chosen.targets)} kernels; the pattern matches none"
        )
    check_installed(chosen)
    check_written(specs)
    results = _compile_all(specs, devices, chosen)
    console().print(_table(results, devices, chosen))
    if record:
        _record(results, chosen)
    return _print_faults(results)


def _print_faults(results: dict[tuple[KernelSpec, str], Compiled]) -> int:
    """Says what is wrong, once for all devices of a spec, and returns the command's exit status."""
    faults: dict[tuple[str, str], list[str]] = {}
    for (spec, device), result in results.items():
        for fault in result.faults:
            faults.setdefault((spec.name, fault), []).append(device)
    out = console()
    for (name, fault), devices in faults.items():
        out.print(f"{name} for {', '.join(devices)}: {fault}", style="red", markup=False, soft_wrap=True)
    good = sum(not result.faults for result in results.values())
    out.print(f"{good} of {len(results)} compilations are as they should be")
    return 1 if faults else 0


def check_installed(platform: Platform) -> None:
    """Raises `CannotVerify` where a package is not installed."""
    for package in platform.packages:
        if importlib.util.find_spec(package) is None:
            raise CannotVerify(
                f"compiling for {', '.join(platform.devices)} needs {package}: pip install 'eqx_attn[{platform.extra}]'"
            )


def check_written(specs: list[KernelSpec]) -> None:
    """Raises `CannotVerify` where a kernel's file, which is what gets compiled, is not what its template writes."""
    for spec in specs:
        path = generated_folder() / f"{spec.name}.py"
        if not path.exists() or path.read_text() != render(spec):
            raise CannotVerify(
                f"generated/{spec.name}.py is missing or not up to date: run `python -m {__package__}` first"
            )


def _compile_all(
    specs: list[KernelSpec], devices: tuple[str, ...], platform: Platform
) -> dict[tuple[KernelSpec, str], Compiled]:
    os.environ.update(platform.environment)  # Workers inherit it before they import JAX.
    jobs = [(spec, device) for spec in specs for device in devices if device in devices_of(spec, platform)]
    workers = min(len(jobs), os.cpu_count() or 1, 8)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    found = {}
    with (
        Progress(*columns, console=Console(stderr=True)) as progress,
        tempfile.TemporaryDirectory(prefix="eqx_attn_schedules_") as folder,
        concurrent.futures.ProcessPoolExecutor(
            workers, multiprocessing.get_context("spawn"), _start_worker, (platform.targets, Path(folder))
        ) as pool,
    ):
        task = progress.add_task("compiling", total=len(jobs))
        futures = {pool.submit(compile_spec, spec, device): (spec, device) for spec, device in jobs}
        for future in concurrent.futures.as_completed(futures):
            spec, device = futures[future]
            found[spec, device] = future.result()
            progress.update(task, advance=1, description=f"{spec.name} for {device}")
    return {job: found[job] for job in jobs}


def _start_worker(targets: tuple[Target, ...], folder: Path) -> None:
    if Target.PALLAS_TPU in targets:
        from . import compilers

        compilers.dump_schedules(folder)


def compile_spec(spec: KernelSpec, device: str) -> Compiled:
    """Compiles forward and backward of one spec for one device kind, in bfloat16 with the default tiles."""
    from . import compilers  # Imports JAX.

    compile_kernels = compilers.compile_tpu if device in PLATFORMS["tpu"].devices else compilers.compile_cuda
    try:
        return Compiled(kernels=compile_kernels(spec, device))
    except Exception as error:  # Whatever a compiler says about one kernel must not end the run over all of them.
        lines = [line for line in str(error).splitlines() if line.strip()]
        return Compiled(error=f"{type(error).__name__}: {' '.join(lines)[:600]}")


def _table(results: dict[tuple[KernelSpec, str], Compiled], devices: tuple[str, ...], platform: Platform) -> Table:
    """A row for each kernel, with a column for each device, or a row for each kernel and device."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    titles = [f"{device}: {', '.join(platform.figures.values())}" for device in devices]
    for title in ("spec", "kernel", *(titles if platform.wide else ("device", *platform.figures.values()))):
        table.add_column(title, justify="left" if title in ("spec", "kernel", "device") else "right", no_wrap=True)
    for spec, kernel in _kernels(results):
        cells = {
            device: [_cell(results[spec, device], kernel, figure) for figure in platform.figures]
            for device in devices
            if (spec, device) in results
        }
        if platform.wide:
            table.add_row(spec.name, kernel, *(" ".join(dict.fromkeys(cells[device])) for device in devices))
        else:
            for device in cells:
                table.add_row(spec.name, kernel, device, *cells[device])
    return table


def _kernels(results: dict[tuple[KernelSpec, str], Compiled]) -> list[tuple[KernelSpec, str]]:
    """Every kernel of every spec; a spec whose compilations all failed has one that is called "-"."""
    found = {(spec, name): None for (spec, _), result in results.items() for name in result.kernels}
    named = {spec for spec, _ in found}
    missing = {(spec, "-"): None for spec, _ in results if spec not in named}
    return sorted([*found, *missing])


def _cell(result: Compiled, kernel: str, figure: str) -> str:
    if result.error:
        return "[red]failed[/red]"
    value = result.kernels.get(kernel, {}).get(figure, "-")
    if isinstance(value, int) and figure in ("vmem", "shared"):
        return f"{value / 2**20:.1f} MiB" if figure == "vmem" else f"{value / 1024:.0f} KiB"
    return f"[red]{value}[/red]" if figure == "spill" and value else str(value)


def _record(results: dict[tuple[KernelSpec, str], Compiled], platform: Platform) -> None:
    """Notes what compiled without a fault. The version of the compiler is the detail."""
    compiler = f"{platform.packages[0]} {importlib.metadata.version(platform.packages[0])}"
    found: dict[str, tuple[str, dict[str, str]]] = {}
    for (spec, device), result in results.items():
        if not result.faults:
            found.setdefault(spec.name, (body_digest(render(spec)), {}))[1][device] = compiler
    COMPILED.add(generated_folder(), found, {spec.name for spec in checked_in()})
