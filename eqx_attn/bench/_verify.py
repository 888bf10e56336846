"""Checks the checked-in kernels against the oracle on the present device: what `--verify` does."""

import concurrent.futures
import contextlib
import dataclasses
import fnmatch
import functools
import importlib
import multiprocessing
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .. import _codegen
from .._codegen import digests, KernelSpec, REPOSITORY
from .._context import interpret
from .._tuning import compiled_capability
from ._environment import commit, device_kind, versions
from ._numerics import compare, computed, expected, make_inputs, NAMES, names_of, Shape, SHAPES, SMALL_SHAPES

# A TPU's compiler takes no float16.
_DTYPES = {"triton": ("bfloat16", "float16"), "gluon_hopper": ("bfloat16", "float16"), "pallas_tpu": ("bfloat16",)}


@dataclasses.dataclass
class Verified:
    """One spec: for each dtype and result the largest relative root-mean-square error, and all faults."""

    errors: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    faults: list[str] = dataclasses.field(default_factory=list)


def verify(
    glob: str,
    jobs: int,
    *,
    interpreted: bool,
    float32: bool,
    record: bool,
    unrecorded: bool,
    given_commit: str | None,
) -> int:
    """Verifies all matching kernels of this device, prints a table, and returns the exit status.

    `unrecorded` leaves out those that `generated/VERIFIED.json` has for this device. `float32` adds that dtype, whose exact
    products compile for minutes on a GPU; the interpreter always does it. Records are written kernel by kernel, so that an
    interrupted run keeps what it has.

    **Raises:** `ValueError` if the device has no kernels, or none matches.
    """
    # Worker processes share the device, so none may take all of its memory. Read when a process first uses the device.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    targets = ("triton",) if interpreted else _targets()
    known = [spec.name for spec in _codegen_module("matrix").checked_in()]
    names = [name for name in known if name.startswith(targets) and fnmatch.fnmatchcase(name, glob)]
    if not names:
        raise ValueError(
            f"--verify {glob} matches no checked-in kernel of {' or '.join(targets)}; python -m codegen --list shows them"
        )
    if unrecorded:
        names = [name for name in names if not _recorded(name)]
        if not names:
            print(f"every kernel that matches {glob} is recorded as right on {device_kind()}")
            return 0
    # A TPU belongs to one process.
    jobs = 1 if interpreted or targets == ("pallas_tpu",) else min(jobs, len(names))
    check = functools.partial(verify_spec, interpreted=interpreted, float32=float32)
    results = {}
    measured = {"versions": versions(), "commit": commit(given_commit)}
    for name, result in _verify_all(names, jobs, check):
        results[name] = result
        if record and not interpreted and not result.faults:
            _record(name, result, set(known), measured)
    results = {name: results[name] for name in names}
    out = Console(width=None if Console().is_terminal else 200, highlight=False)
    out.print(_table(results, "the interpreter" if interpreted else device_kind()))
    for name, result in results.items():
        for fault in result.faults:
            out.print(f"{name}: {fault}", style="red", markup=False, soft_wrap=True)
    bad = sum(bool(result.faults) for result in results.values())
    out.print(f"{len(results) - bad} of {len(results)} kernels agree with the oracle and repeat bit for bit")
    return 1 if bad else 0


def _targets() -> tuple[str, ...]:
    """Those whose kernels this device runs."""
    targets = {"gpu": ("triton",), "tpu": ("pallas_tpu",)}
    platform = jax.default_backend()
    if platform not in targets:
        raise ValueError(
            f"--verify needs a GPU or a TPU, and JAX's default backend here is {platform!r}; --interpret checks the "
            "kernels under Triton's interpreter instead"
        )
    if platform == "gpu" and compiled_capability() == 90:
        return ("triton", "gluon_hopper")
    return targets[platform]


def _codegen_module(name: str) -> Any:
    return importlib.import_module(f"{_codegen._package}.{name}")


def _verify_all(names: list[str], jobs: int, check: Callable[[str], Verified]) -> Iterator[tuple[str, Verified]]:
    """Each kernel with its result, as they get ready."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(Progress(*columns, console=Console(stderr=True)))
        task = progress.add_task("verifying", total=len(names))
        if jobs == 1:
            for name in names:
                yield name, check(name)
                progress.update(task, advance=1, description=name)
            return
        # Most of the time goes into compiling, which needs no device: a process for each core.
        pool = concurrent.futures.ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"))
        stack.enter_context(pool)
        # Large head dims compile longest, so they start first.
        slowest_first = sorted(names, key=lambda name: -KernelSpec.from_name(name).qk_dim)
        futures = {pool.submit(check, name): name for name in slowest_first}
        for future in concurrent.futures.as_completed(futures):
            name = futures[future]
            yield name, _result_of(future)
            progress.update(task, advance=1, description=name)


def _result_of(future: concurrent.futures.Future) -> Verified:
    try:
        return future.result()
    except concurrent.futures.process.BrokenProcessPool as error:
        return Verified(faults=[f"a worker process died (try fewer --jobs): {error}"])


def verify_spec(name: str, interpreted: bool, float32: bool) -> Verified:
    """All dtypes and shapes of one kernel, in this process."""
    spec = KernelSpec.from_name(name)
    result = Verified()
    dtypes = ("float16", "float32") if interpreted else (*_DTYPES[str(spec.target)], *(("float32",) if float32 else ()))
    for dtype in dtypes:
        for shape in SMALL_SHAPES if interpreted else _shapes(dtype):
            where = f"{dtype} {shape.q_seq} x {shape.kv_seq}"
            try:
                with interpret() if interpreted else contextlib.nullcontext():
                    _verify_call(spec, shape, dtype, where, result)
            except Exception as error:  # Whatever happens to one kernel must not end the run over all of them.
                text = " ".join(f"{type(error).__name__}: {error}".split())
                result.faults.append(f"{where}: {text[:500]}")
    return result


def _shapes(dtype: str) -> tuple[Shape, ...]:
    """Exact float32 products compile slowly on a GPU, and the ragged shapes cover more."""
    return SHAPES[:2] if dtype == "float32" else SHAPES


def _verify_call(spec: KernelSpec, shape: Shape, dtype: str, where: str, result: Verified) -> None:
    inputs = make_inputs(spec, shape, dtype)
    first, second = ([np.asarray(x) for x in computed(inputs)] for _ in range(2))
    wanted = expected(inputs)
    dim, length = max(spec.qk_dim, spec.v_dim), max(shape.q_seq, shape.kv_seq)
    worst = result.errors.setdefault(dtype, dict.fromkeys(names_of(spec), 0.0))
    for name, found, again, want in zip(names_of(spec), first, second, wanted, strict=True):
        errors = compare(name, found.astype(np.float32), want, dtype, dim, length)
        worst[name] = max(worst[name], errors.rms)
        if errors.fault:
            result.faults.append(f"{where}: {errors.fault}")
        if found.tobytes() != again.tobytes():
            result.faults.append(f"{where}: {name} differs from run to run")


def _table(results: dict[str, Verified], device: str) -> Table:
    table = Table(title=f"relative rms error on {device}", box=None, header_style="bold", pad_edge=False)
    table.add_column("spec", no_wrap=True)
    table.add_column("dtype", no_wrap=True)
    for name in NAMES:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for name, result in results.items():
        for dtype, errors in result.errors.items():
            bad = any(fault.startswith(dtype) for fault in result.faults)
            verdict = "[red]wrong[/red]" if bad else "right"
            table.add_row(name, dtype, *(f"{errors[part]:.1e}" if part in errors else "" for part in NAMES), verdict)
        if not result.errors:
            table.add_row(name, "-", *("-" for _ in NAMES), "[red]failed[/red]")
    return table


def _recorded(name: str) -> bool:
    """Whether `generated/VERIFIED.json` says that the kernel's present text is right on this device."""
    folder = REPOSITORY / "generated"
    records = _codegen_module("records").VERIFIED
    digest = digests((folder / f"{name}.py").read_text())[1]
    return device_kind() in records.lookup(records.read(folder), name, digest)


def _record(name: str, result: Verified, known: set[str], measured: dict[str, Any]) -> None:
    """Notes a kernel without a fault in `generated/VERIFIED.json`, by the digest of what lies in `generated/`."""
    folder = REPOSITORY / "generated"
    errors = {
        dtype: {part: float(f"{error:.2g}") for part, error in parts.items()} for dtype, parts in result.errors.items()
    }
    details = {**measured, "errors": errors}
    digest = digests((folder / f"{name}.py").read_text())[1]
    _codegen_module("records").VERIFIED.add(folder, {name: (digest, {device_kind(): details})}, known)
