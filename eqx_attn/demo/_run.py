"""The demo from data to picture."""

import dataclasses
import functools
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from .. import explain
from .._attention import Implementation
from ._data import load, Packed, unigram_loss, VOCABULARY
from ._model import document_mask, GPT, rotary_attention
from ._plot import plot_losses
from ._sample import sample
from ._train import fit, History, Recipe

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
    verbose: bool = False


def run(options: Options) -> int:
    """Trains, reports, and returns the exit status."""
    console = Console(highlight=False)
    # A row is read twice, as inputs and moved by one as targets: it has one byte more.
    train, validation = load(options.length + 1, seed=options.seed)
    unigram = unigram_loss(train, validation)
    model = build(options)
    _describe(console, options, model, train, validation)
    console.print(f"unigram baseline on validation: {unigram:.3f} nats per byte\n")
    recipe = Recipe(options.steps, options.seconds, options.batch, dtype=options.dtype, seed=options.seed)
    with _Report(console) as report:
        model, history = fit(model, train, validation, recipe, report)
    console.print(f"\n{len(history.train)} steps in {history.seconds:.0f} s")
    prompt = "The "
    console.rule(f"a sample that begins with {prompt!r}")
    console.print(sample(model, prompt, options.length, seed=options.seed), markup=False)
    console.rule()
    path = options.output / "loss.png"
    plot_losses(history, unigram, path)
    console.print(f"loss curve: {path}")
    return verdict(console, history, unigram)


def build(options: Options) -> GPT:
    """The model of these options."""
    attention = functools.partial(rotary_attention, implementation=options.implementation)
    heads = (options.num_heads, options.num_kv_heads)
    key = jax.random.key(options.seed)
    return GPT(VOCABULARY, options.width, options.depth, *heads, attention=attention, key=key)


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
