"""The command `python -m eqx_attn.bench --cases hopper`."""

import argparse
import sys
from pathlib import Path

import jax
from rich.console import Console

from ._environment import device_kind
from ._hopper import OURS, run as run_cases
from ._hopper_cases import select_hopper
from ._hopper_rows import missed, table
from ._peers import HOPPER_PEERS

_DEFAULT_OURS = "gluon_hopper,triton"
_DEFAULT_PEERS = "cudnn,fa4,fa3,tokamax"


def run(options: argparse.Namespace) -> int:
    """Times, prints the table and the bars that are missed, and returns the exit status: 1 where something is wrong.

    **Raises:** `ValueError` where the arguments name something unknown, or "hopper" is asked for without a GPU.
    """
    cases = select_hopper(options.cases, options.only)
    names = _names("--ours", options.ours, _DEFAULT_OURS, OURS)
    peers = _names("--peers", options.peers, _DEFAULT_PEERS, tuple(HOPPER_PEERS))
    if options.cases == "hopper" and jax.default_backend() != "gpu":
        raise ValueError(
            f"--cases hopper needs a GPU, and JAX's default backend here is {jax.default_backend()!r}; "
            "--cases hopper_smoke --ours xla --peers jax_xla runs on any device"
        )
    path = options.output or default_output(device_kind())
    rows, wrong = run_cases(cases, names, peers, options.repeats, options.jobs, path, options.commit)
    console = Console(highlight=False)
    console = console if console.is_terminal else Console(width=200, highlight=False)
    console.print(table(rows, f"{device_kind()}, in {path}"))
    for name in names:
        for line in missed(rows, name):
            console.print(f"{name} misses {line}", markup=False)
    for fault in wrong:
        print(fault, file=sys.stderr)
    return 1 if wrong else 0


def default_output(device: str) -> Path:
    """`benchmarks/h200.json` for an "NVIDIA H200"."""
    return Path("benchmarks") / f"{device.lower().removeprefix('nvidia ').replace(' ', '_').replace('/', '_')}.json"


def _names(option: str, given: str | None, default: str, known: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(name.strip() for name in (default if given is None else given).split(",") if name.strip())
    for name in names:
        if name not in known:
            raise ValueError(f"{option} {name} is unknown; known are {', '.join(known)}")
    return names
