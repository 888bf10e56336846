"""The demo from data to picture."""

import contextlib
import dataclasses
import functools
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from .. import explain
from .._attention import Implementation
from ..sharding._context import ContextParallel, OrderName, Strategy
from ._checkpoint import load as load_checkpoint, save as save_checkpoint
from ._data import load, Packed, unigram_loss, VOCABULARY
from ._mesh import Splits
from ._model import document_mask, GPT, rotary_attention
from ._plot import plot_losses
from ._sample import sample
from ._train import evaluate, fit, History, init_optimiser, Recipe

TARGET = 1.0
"""By how many nats per byte the validation loss has to end under its start and under the unigram baseline."""


@dataclasses.dataclass(frozen=True)
class Options:
    """The command's options."""

    steps: int
    seconds: float
    output: Path
    batch: int
    length: int
    width: int
    depth: int
    num_heads: int
    num_kv_heads: int
    dtype: str
    implementation: Implementation | None
    seed: int
    mesh: Splits | None = None
    strategy: Strategy = "ring"
    order: OrderName = "dual_chunk"
    checkpoint: Path | None = None
    resume: Path | None = None
    stop_at: int | None = None
    verbose: bool = False

    @property
    def context(self) -> ContextParallel | None:
        """That of the model's attention."""
        return None if self.mesh is None else self.mesh.parallel(self.strategy, self.order)


_SAME = ("length", "batch", "width", "depth", "num_heads", "num_kv_heads", "dtype", "seed")
"""The options that a run has to go on with."""


def run(options: Options) -> int:
    """Trains, reports, and returns the exit status."""
    console = Console(highlight=False)
    # A row is read twice, as inputs and moved by one as targets: it has one byte more.
    train, validation = load(options.length + 1, seed=options.seed)
    unigram = unigram_loss(train, validation)
    with _mesh(options):
        model = build(options)
        _describe(console, options, model, train, validation)
        console.print(f"unigram baseline on validation: {unigram:.3f} nats per byte\n")
        model, history = _train(console, options, model, train, validation)
    console.print(f"\n{len(history.train)} steps in {history.seconds:.0f} s")
    if options.stop_at is not None and history.train[-1][0] == options.stop_at < options.steps:
        console.print(f"stopped at step {options.stop_at} of {options.steps}, as --stop-at says")
        return 0
    prompt = "The "
    console.rule(f"a sample that begins with {prompt!r}")
    console.print(sample(_on_one_device(options, model), prompt, options.length, seed=options.seed), markup=False)
    console.rule()
    path = options.output / "loss.png"
    plot_losses(history, unigram, path)
    console.print(f"loss curve: {path}")
    return verdict(console, history, unigram)


def build(options: Options) -> GPT:
    """The model of these options."""
    context = options.context
    attention = functools.partial(rotary_attention, implementation=options.implementation, context=context)
    heads = (options.num_heads, options.num_kv_heads)
    key = jax.random.key(options.seed)
    return GPT(VOCABULARY, options.width, options.depth, *heads, attention=attention, context=context, key=key)


def _mesh(options: Options) -> contextlib.AbstractContextManager:
    if options.mesh is None:
        return contextlib.nullcontext()
    options.mesh.check(options.batch, options.length, options.context)
    return jax.set_mesh(options.mesh.mesh())


def _on_one_device(options: Options, model: GPT) -> GPT:
    """The same parameters in a model without a context, for rows of any length."""
    alone = build(dataclasses.replace(options, mesh=None))
    parameters, rest = eqx.partition(alone, eqx.is_array)
    trained = map(np.asarray, jax.tree.leaves(eqx.filter(model, eqx.is_array)))
    return eqx.combine(jax.tree.unflatten(jax.tree.structure(parameters), trained), rest)


def _train(console: Console, options: Options, model: GPT, train: Packed, validation: Packed) -> tuple[GPT, History]:
    """Trains from the start or from the checkpoint of --resume, and keeps checkpoints where --checkpoint says."""
    recipe = Recipe(
        options.steps, options.seconds, options.batch, dtype=options.dtype, seed=options.seed, stop_at=options.stop_at
    )
    same = {name: getattr(options, name) for name in _SAME}
    earlier = None
    if options.resume is not None:
        like = (model, init_optimiser(model))
        history, (model, state) = load_checkpoint(options.resume, same, like)
        earlier = (state, history)
        step, before = history.validation[-1]
        loss = evaluate(model, validation, 2 * recipe.batch, recipe.dtype)
        console.print(f"resumed at step {step}: validation loss {loss:.6f}, and {before:.6f} where it was written")
        if step >= min(options.steps, options.stop_at or options.steps):
            raise ValueError(f"--resume {options.resume} has {step} steps already: give more with --steps")

    def keep(model, state, history):
        if options.checkpoint is not None:
            save_checkpoint(options.checkpoint, same, history, (model, state))

    with _Report(console) as report:
        return fit(model, train, validation, recipe, report, keep, earlier)


def verdict(console: Console, history: History, unigram: float) -> int:
    """Prints how far the validation loss has come; 0 if far enough, else 1."""
    start, end = history.validation[0][1], history.validation[-1][1]
    console.print(
        f"validation loss {end:.3f}: {start - end:.2f} under its start, {unigram - end:.2f} under the unigram baseline"
    )
    if min(start, unigram) - end >= TARGET:
        return 0
    console.print(
        f"NOT REACHED: at least {TARGET} nat under both was wanted. It took {len(history.train)} steps; give it more "
        "with --steps and --seconds."
    )
    return 1


def _describe(console: Console, options: Options, model: GPT, train: Packed, validation: Packed) -> None:
    size = sum(x.size for x in jax.tree.leaves(eqx.filter(model, eqx.is_array)))
    packed = train.segment_ids.max(axis=1).mean()
    text = train.tokens.size + validation.tokens.size
    console.print(
        f"text: {text:,} bytes of Python's help texts, {packed:.1f} documents in a row of {options.length}; "
        f"{len(train.tokens)} rows for training, {len(validation.tokens)} about other topics for validation\n"
        f"model: {size:,} parameters, {options.depth} blocks of width {options.width}, "
        f"{options.num_heads} query and {options.num_kv_heads} key heads\n"
    )
    shape = (options.batch, options.length)
    dim = options.width // options.num_heads
    query = jax.ShapeDtypeStruct((*shape, options.num_heads, dim), options.dtype)
    key = jax.ShapeDtypeStruct((*shape, options.num_kv_heads, dim), options.dtype)
    mask = document_mask(jnp.asarray(train.segment_ids[: options.batch, :-1]))
    console.print("the attention of one training step:")
    console.print(str(explain(query, key, key, mask=mask, implementation=options.implementation)), markup=False)
    console.print()


class _Report:
    """A progress bar, and a line for each evaluation."""

    def __init__(self, console: Console):
        columns = ("{task.description}", BarColumn(), "{task.percentage:3.0f} %", "{task.fields[losses]}")
        self.bar = Progress(
            *(TextColumn(column) if isinstance(column, str) else column for column in columns),
            TimeElapsedColumn(),
            console=console,
        )
        self.task = self.bar.add_task("compiling", total=1.0, losses="")
        self.evaluations = 0

    def __enter__(self) -> "_Report":
        self.bar.start()
        return self

    def __exit__(self, *error) -> None:
        self.bar.stop()

    def __call__(self, step: int, progress: float, history: History) -> None:
        if len(history.validation) > self.evaluations:
            self.evaluations = len(history.validation)
            loss = history.validation[-1][1]
            self.bar.console.print(
                f"step {step:5d}   {history.seconds:5.0f} s   validation loss {loss:.3f} nats per byte"
            )
        losses = f"step {step}" + (f", training loss {history.train[-1][1]:.2f}" if history.train else "")
        name = "training" if history.train else "compiling"
        self.bar.update(self.task, description=name, completed=progress, losses=losses)
