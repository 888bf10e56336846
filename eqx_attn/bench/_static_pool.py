"""Measuring many programs in processes of their own, since libtpu reads its flags once and may end its process."""

import concurrent.futures
import dataclasses
import importlib
import multiprocessing
import os
import queue
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .. import _codegen
from ._static import measure, Measured, Program, start_dumping


@dataclasses.dataclass(frozen=True)
class Job:
    """`build(*arguments)`, in a process of its own, makes the program to measure on `device`. Both can be pickled."""

    build: Callable[..., Program]
    arguments: tuple[Any, ...]
    device: str


def measure_all(jobs: list[Job], processes: int, seconds: float = 600) -> Iterator[tuple[Job, Measured | str]]:
    """Each job with its result, or with what went wrong, as they get ready. A job may take so many seconds."""
    os.environ.update(importlib.import_module(f"{_codegen._package}.verify").PLATFORMS["tpu"].environment)
    waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
    for job in jobs:
        waiting.put(job)
    results: queue.SimpleQueue[tuple[Job, Measured | str]] = queue.SimpleQueue()

    def work(folder: Path) -> None:
        worker = _Worker(folder)
        try:
            while not waiting.empty():
                job = waiting.get_nowait()
                results.put((job, worker.run(job, seconds)))
        except queue.Empty:
            pass
        finally:
            worker.stop()

    with (
        tempfile.TemporaryDirectory(prefix="eqx_attn_schedules_") as folder,
        concurrent.futures.ThreadPoolExecutor(processes) as threads,
    ):
        for _ in range(min(processes, len(jobs))):
            threads.submit(work, Path(folder))
        for _ in jobs:
            yield results.get()


class _Worker:
    """A process that measures one job after the other, and is replaced where it dies or takes too long."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: Any = None
        self._pipe: Any = None

    def run(self, job: Job, seconds: float) -> Measured | str:
        """The job's result, or what went wrong."""
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(theirs, self._folder), daemon=True)
            self._process.start()
            theirs.close()
        try:
            self._pipe.send(job)
            if self._pipe.poll(seconds):
                return self._pipe.recv()
            fault = f"compiling took more than {seconds:g} seconds"
        except (EOFError, OSError):
            self._process.join()
            fault = f"the compiler ended its process with status {self._process.exitcode}"
        self.stop()
        return fault

    def stop(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
        self._process = None


def _serve(pipe: Any, folder: Path) -> None:
    folder = start_dumping(folder)
    try:
        while True:
            job = pipe.recv()
            try:
                result = measure(job.build(*job.arguments), job.device, folder)
            except Exception as error:  # One program that does not compile must not end the run over all of them.
                lines = [line for line in str(error).splitlines() if line.strip()]
                result = f"{type(error).__name__}: {' '.join(lines)[:600]}"
            pipe.send(result)
    except EOFError:
        pass
