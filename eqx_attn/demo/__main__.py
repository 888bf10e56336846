"""The command `python -m eqx_attn.demo`."""

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import get_args

from .._attention import Implementation
from ..sharding._context import OrderName, Strategy
from ._mesh import simulate, Splits

_DESCRIPTION = """\
Trains a small byte-level GPT on English text that ships with Python (the help texts of `pydoc_data.topics`), with the
attention of eqx_attn: causal, rotary, two query heads on one key head, several documents packed in a row. It prints
which kernel serves the attention and why, the unigram baseline, the validation loss as it falls, and a sample, and it
writes the loss curve as a picture. With the defaults it takes about two minutes on two CPU cores.

With --mesh it trains on several devices, for instance

  python -m eqx_attn.demo --mesh data=2,context=4 --steps 40 --stop-at 20 --checkpoint run.eqx --seconds 900
  python -m eqx_attn.demo --mesh data=2,context=2 --steps 40 --resume run.eqx --seconds 900

Exit status: 0 if the validation loss ended at least 1 nat per byte under both its start and the unigram baseline, 1 if
it did not, 2 if the demo could not run, 130 if it was interrupted."""

_NEEDED = {"optax": "the optimiser", "matplotlib": "the loss curve", "rich": "the progress bar"}


def main(arguments: list[str] | None = None) -> int:
    """Runs the demo; returns the exit status."""
    options = _parser().parse_args(arguments)
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        what = " and ".join(f"{name} ({_NEEDED[name]})" for name in missing)
        return _fail(f"it needs {what}: install them with  pip install 'eqx_attn[dev]'")
    try:
        options.output.mkdir(parents=True, exist_ok=True)
        if options.checkpoint is not None:
            options.checkpoint.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return _fail(f"it cannot make the folder {error.filename} of --output or --checkpoint: {error.strerror}")
    from ._run import Options, run

    try:
        if options.mesh is not None:
            simulate(options.mesh.devices)
        return run(Options(**vars(options)))
    except (ValueError, TypeError, RuntimeError, OSError) as error:
        # What eqx_attn and jax refuse, they refuse with a message for the reader: a width, a dtype, an absent backend.
        if options.verbose:
            raise
        return _fail(f"{error}\n(--verbose shows where)")
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m eqx_attn.demo", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def add(name, kind, default, text, **more):
        parser.add_argument(name, type=kind, default=default, help=f"{text} (default: %(default)s)", **more)

    add("--steps", _positive_int, 500, "stop after so many training steps")
    add("--seconds", _positive_float, 110.0, "stop training after so many seconds, compilation included", metavar="S")
    add("--output", Path, Path("demo_output"), "folder for loss.png", metavar="DIR")
    add("--batch", _positive_int, 4, "rows in a batch")
    add("--length", _positive_int, 256, "bytes in a row of packed documents")
    add("--width", _positive_int, 128, "channels of the model")
    add("--depth", _positive_int, 3, "blocks of the model")
    add("--num-heads", _positive_int, 2, "query heads")
    add("--num-kv-heads", _positive_int, 1, "key and value heads")
    add("--dtype", str, "float32", "dtype to compute in; bfloat16 for GPU and TPU", choices=["float32", "bfloat16"])
    add("--implementation", str, None, "of attention; None takes the fastest", choices=get_args(Implementation))
    add("--seed", int, 0, "seed of the parameters, the batches and the sample")

    mesh = parser.add_argument_group(
        "several devices", "On a CPU as many devices as the mesh takes are simulated. Parameters are whole on each."
    )
    mesh.add_argument(
        "--mesh", type=_splits, metavar="data=N,context=N", help="rows over N devices, the tokens of each over N (none)"
    )
    mesh.add_argument("--strategy", default="ring", choices=get_args(Strategy), help="(default: %(default)s)")
    mesh.add_argument(
        "--order", default="dual_chunk", choices=get_args(OrderName), help="of tokens (default: %(default)s)"
    )
    kept = parser.add_argument_group("checkpoints")
    kept.add_argument("--checkpoint", type=Path, metavar="FILE", help="write the run to FILE at each evaluation")
    kept.add_argument(
        "--resume",
        type=Path,
        metavar="FILE",
        help="go on with the run of a checkpoint, on any mesh; --seconds then counts those of before",
    )
    kept.add_argument("--stop-at", type=_positive_int, metavar="STEP", help="stop at a step of --steps, to go on later")
    parser.add_argument("--verbose", action="store_true", help="show the whole traceback of an error")
    return parser


def _positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def _splits(text: str) -> Splits:
    try:
        return Splits.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _positive_float(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _fail(message: str) -> int:
    print(f"The demo could not run: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
