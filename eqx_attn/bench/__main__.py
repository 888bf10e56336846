"""The command `python -m eqx_attn.bench`."""

import argparse
import importlib.util
import os
import sys
import time
from pathlib import Path

_DESCRIPTION = """\
Times eqx_attn.attention on this machine's GPU against what comes with JAX (the default), checks the checked-in kernels
against the dense oracle (--verify), times a training step against equinox's layer (--train-step), or predicts the
efficiency of sequences over devices (--predict, which runs nothing), or measures TPU kernels by the schedules of the
compiler (--static, which needs no TPU).

Times are busy times of the GPU from JAX's profiler, medians over repeats in which all implementations take turns; the
backward is the time of both directions less that of the forward. TFLOP/s count visible scores only: 4 operations
per score and channel of the head forward, 10 backward. The group "features" times each feature alone; its cost is our time
over that of our dense causal kernel, which takes turns in the same traces.

  python -m eqx_attn.bench --cases hd128_causal_4k,window_16k --output results.json --plot results.png
  python -m eqx_attn.bench --cases features --peers cudnn --plot features.png
  python -m eqx_attn.bench --cases context --output context.json
  python -m eqx_attn.bench --cases hopper --peers cudnn,fa4,fa3,tokamax --only hd128-causal-4k,gqa-causal-8k
  python -m eqx_attn.bench --verify 'triton/*causal*' --record
  python -m eqx_attn.bench --train-step --output step.json
  python -m eqx_attn.bench --predict --tokens 1048576 --link-bandwidth 370,50 --plot efficiency.png
  python -m eqx_attn.bench --tune --spec 'triton/bshd_causal*' --direction fwd --write-table
  python -m eqx_attn.bench --static v6e --spec bhsd_full_qk128_v128 --tile forward=2048x2048

Exit status: 0 if all went well, 1 if a kernel disagrees with the oracle or a measurement failed, 2 if the program could
not run."""


def main(arguments: list[str] | None = None) -> int:
    """Runs the program; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        if options.list:
            return _list()
        if options.verify is not None:
            from ._verify import verify

            return verify(
                options.verify,
                options.jobs,
                interpreted=options.interpret,
                float32=options.float32,
                record=options.record,
                unrecorded=options.unrecorded,
                given_commit=options.commit,
            )
        if options.predict:
            return _predict(options)
        if options.static is not None:
            from ._static_command import run

            return run(options)
        if options.tune:
            from ._tune_command import run as run_tune

            return run_tune(options)
        return _train_step(options) if options.train_step else _time(options)
    except (ValueError, OSError) as error:
        if options.verbose:
            raise
        print(f"eqx_attn.bench could not run: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130


def _list() -> int:
    from ._cases import GROUPS
    from ._hopper_cases import HOPPER_GROUPS

    for group, cases in (GROUPS | HOPPER_GROUPS).items():
        print(f"{group}:")
        for name, case in cases.items():
            print(f"  {name:16} {case}")
    print("context, context_smoke: one sequence over all devices, against one device at half the tokens")
    return 0


def _time(options: argparse.Namespace) -> int:
    # A CUDA graph may reach the profiler as one event of another kind. Read when a GPU is first used.
    if "xla_gpu_enable_command_buffer" not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer=".strip()
    import jax

    from . import _context, _run
    from ._cases import FEATURES, select, SMOKE
    from ._hopper_cases import HOPPER_GROUPS
    from ._implementations import OURS, PEERS

    if options.cases in _context.CASES:
        if options.cases == "context" and jax.default_backend() != "gpu":
            raise ValueError("--cases context needs GPUs; --cases context_smoke runs on any devices")
        results = _context.run(options.cases, options.repeats, options.commit)
        _run.save(results, options.output or _default_output("context", results["device"]))
        _print(_context.table(results))
        return 0
    if options.cases in HOPPER_GROUPS:
        from ._hopper_command import run as run_hopper

        return run_hopper(options)
    if options.only or options.ours:
        raise ValueError(f"--only and --ours belong to --cases {' or '.join(HOPPER_GROUPS)}")
    cases = select(options.cases)
    on_gpu = jax.default_backend() == "gpu"
    if not on_gpu and not set(cases) <= set(SMOKE):
        raise ValueError(f"JAX finds no GPU here, only {jax.default_backend()!r}; --cases smoke runs on any device")
    default = "xla" if not on_gpu else "cudnn" if set(cases) <= set(FEATURES) else "cudnn,xla"
    peers = tuple(filter(None, (default if options.peers is None else options.peers).split(",")))
    if unknown := [peer for peer in peers if peer not in PEERS]:
        raise ValueError(f"--peers {unknown[0]} is unknown; known are {', '.join(PEERS)}")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install 'eqx_attn[bench]'")
    results = _run.run(cases, peers, options.repeats, options.commit)
    _run.save(results, options.output or _default_output(_what(options), results["device"]))
    _print(_run.table(results))
    if options.plot:
        from ._plot import plot

        plot(results, options.plot)
    missing = [row for row in results["rows"] if row["implementation"] == OURS and row["milliseconds"] is None]
    return 1 if missing else 0


def _predict(options: argparse.Namespace) -> int:
    from ._cost_model import Machine, Work
    from ._predict import plot, table

    if options.plot and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install 'eqx_attn[bench]'")
    q_heads, kv_heads = options.q_heads, options.kv_heads or options.q_heads
    if q_heads % kv_heads:
        raise ValueError(f"--q-heads {q_heads} is no multiple of --kv-heads {kv_heads}")
    work = Work(options.tokens, q_heads, kv_heads, options.head_dim)
    speeds = (options.forward_tflops, options.backward_tflops)
    rest = (1e-6 * options.latency, options.memory_bandwidth)
    machines = [Machine(*speeds, link, *rest) for link in options.link_bandwidth]
    for machine in machines:
        _print(table(work, machine))
    if options.plot:
        plot(work, machines, options.plot)
    return 0


def _what(options: argparse.Namespace) -> str:
    return "features" if options.cases == "features" else "attention"


def _train_step(options: argparse.Namespace) -> int:
    if importlib.util.find_spec("optax") is None:
        raise ValueError("--train-step needs optax: pip install optax")
    # The measuring processes need the device's memory, which this one would take.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    from . import _run, _train_step

    size = _train_step.Size(
        options.length, options.width, options.depth, options.heads, options.repeats_of_step, options.dtype
    )
    if size.width % size.heads:
        raise ValueError(f"--width {size.width} is not a multiple of --heads {size.heads}")
    results = _train_step.run(size, options.commit)
    _run.save(results, options.output or _default_output("train_step", results["device"]))
    _print(_train_step.table(results))
    for name, found in results["layers"].items():
        if "error" in found:
            print(f"{name}: {found['error']}", file=sys.stderr)
    return 1 if "error" in results["layers"]["eqx_attn"] else 0


def _default_output(what: str, device: str) -> Path:
    name = device.lower().replace(" ", "_").replace("/", "_")
    return Path("benchmarks/results") / f"{time.strftime('%Y-%m-%d', time.gmtime())}_{what}_{name}.json"


def _print(table) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    (console if console.is_terminal else Console(width=200, highlight=False)).print(table)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m eqx_attn.bench", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--list", action="store_true", help="list the cases")
    what.add_argument(
        "--verify",
        nargs="?",
        const="*",
        metavar="GLOB",
        help="check the kernels whose name matches, such as 'triton/*'",
    )
    what.add_argument("--train-step", action="store_true", help="time a training step against equinox's layer")
    what.add_argument(
        "--predict", action="store_true", help="predict the efficiency of sequences over 8 to 512 devices; runs nothing"
    )
    what.add_argument(
        "--static",
        nargs="?",
        const="",
        metavar="TPU[,TPU]",
        help="measure TPU kernels for these generations (default: all) by libtpu's schedules, without a TPU",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON file (default: below benchmarks/results)")
    parser.add_argument("--commit", metavar="TEXT", help="the commit to note (default: $EQX_ATTN_COMMIT, or git's)")
    parser.add_argument("--verbose", action="store_true", help="show the whole traceback of an error")

    timing = parser.add_argument_group("timing")
    timing.add_argument(
        "--cases", default="triton", metavar="NAME[,NAME]", help="cases, patterns or groups (default: %(default)s)"
    )
    timing.add_argument(
        "--peers",
        metavar="NAME[,NAME]",
        help="cudnn and xla (default: both, for features cudnn, on a CPU xla; '' for none); for hopper cudnn, fa4 (fa4-jax), fa3 "
        "(flash-attn3-jax) and tokamax (default: all four), and jax_xla",
    )
    timing.add_argument("--only", metavar="CASE[,CASE]", help="of --cases hopper only these")
    timing.add_argument(
        "--ours", metavar="NAME[,NAME]", help="of --cases hopper: our implementations (default: gluon_hopper,triton)"
    )
    timing.add_argument("--repeats", type=_positive, default=5, metavar="N", help="repeats (default: %(default)s)")
    timing.add_argument("--plot", type=Path, metavar="FILE", help="write a picture (PNG)")

    verifying = parser.add_argument_group("--verify")
    verifying.add_argument("--record", action="store_true", help="note what is right in generated/VERIFIED.json")
    verifying.add_argument(
        "--unrecorded",
        action="store_true",
        help="only kernels that generated/VERIFIED.json does not say are right on this device",
    )
    cores = max(1, (os.cpu_count() or 2) - 2)
    verifying.add_argument(
        "--jobs",
        type=_positive,
        default=cores,
        metavar="N",
        help="processes that share a GPU, and compilers at once of --cases hopper (default: %(default)s)",
    )
    verifying.add_argument(
        "--float32", action="store_true", help="float32 as well, which compiles for minutes on a GPU"
    )
    verifying.add_argument("--interpret", action="store_true", help="on the CPU, Triton kernels in their interpreter")

    step = parser.add_argument_group("--train-step")
    for name, default, text in (
        ("length", 8192, "tokens in the one row"),
        ("width", 1024, "channels of the model"),
        ("depth", 12, "layers"),
        ("heads", 8, "heads"),
    ):
        step.add_argument(
            f"--{name}", type=_positive, default=default, metavar="N", help=f"{text} (default: %(default)s)"
        )
    step.add_argument(
        "--steps",
        dest="repeats_of_step",
        type=_positive,
        default=10,
        metavar="N",
        help="steps timed (default: %(default)s)",
    )
    step.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="(default: %(default)s)")
    _add_prediction(parser.add_argument_group("--predict", "The defaults are what was measured on H200s with NVLink."))
    _add_static(parser)
    return parser


def _add_static(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("--static", "Cycles of the compiler's final schedule; needs libtpu and no TPU.")
    group.add_argument("--spec", metavar="NAME[,NAME]", help="only these kernels of ours, such as bhsd_full_qk128_v128")
    group.add_argument("--seq", type=_positive, default=8192, metavar="N", help="tokens (default: %(default)s)")
    group.add_argument(
        "--tile",
        action="append",
        default=[],
        metavar="KERNEL=QxKV[,FIELD=N]",
        help="with --spec: another tile for a kernel, such as forward=2048x1024 (repeatable)",
    )
    group.add_argument(
        "--tune",
        action="store_true",
        help="find the best tiles of our kernels, or of those of --spec; without --static, of this machine's GPU by timing",
    )
    group.add_argument(
        "--write-table",
        action="store_true",
        help="with --tune: put them into eqx_attn/tiles/DEVICE.json, which kernels follow (of a GPU they are in the user's "
        "cache in any case)",
    )
    group.add_argument("--workload", choices=("ring",), help="the time of a published ring attention instead")
    group.add_argument("--direction", choices=("fwd", "bwd"), help="with --spec: only forward or backward")
    group.add_argument(
        "--processes", type=_positive, default=1, metavar="N", help="compilers at once (default: %(default)s)"
    )


def _add_prediction(group) -> None:
    for name, kind, default, unit, text in (
        ("--tokens", _positive, 1 << 20, "N", "tokens of the one sequence"),
        ("--q-heads", _positive, 16, "N", "query heads"),
        ("--head-dim", _positive, 128, "N", "channels of a head"),
        ("--forward-tflops", _above_zero, 471.0, "X", "of the forward kernel on one device"),
        ("--backward-tflops", _above_zero, 353.0, "X", "of the backward kernels on one device"),
        ("--latency", _above_zero, 150.0, "US", "microseconds of a message"),
        ("--memory-bandwidth", _above_zero, 4000.0, "GB/S", "of a device's memory, for sums of partial results"),
    ):
        group.add_argument(name, type=kind, default=default, metavar=unit, help=f"{text} (default: %(default)s)")
    group.add_argument("--kv-heads", type=_positive, metavar="N", help="key heads (default: as many as query heads)")
    group.add_argument(
        "--link-bandwidth",
        type=lambda text: [_above_zero(part) for part in text.split(",")],
        default=[370.0],
        metavar="GB/S[,GB/S]",
        help="of one device's links, each way: a table and a panel of the plot for each (default: 370)",
    )


def _above_zero(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
