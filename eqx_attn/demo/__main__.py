"""The command `python -m eqx_attn.demo`."""

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import get_args

from .._attention import Implementation

_DESCRIPTION = """\
Trains a small byte-level GPT on English text that ships with Python (the help texts of `pydoc_data.topics`), with the
attention of eqx_attn: causal, rotary, two query heads on one key head, several documents packed in a row. It prints
which kernel serves the attention and why, the unigram baseline, the validation loss as it falls, and a sample, and it
writes the loss curve as a picture. With the defaults it takes about two minutes on two CPU cores.

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
    except OSError as error:
        return _fail(f"it cannot make the folder of --output {options.output}: {error.strerror}")
    from ._run import Options, run

    try:
        return run(Options(**vars(options)))
    except (ValueError, TypeError, RuntimeError) as error:
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
    parser.add_argument("--verbose", action="store_true", help="show the whole traceback of an error")
    return parser


def _positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


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
