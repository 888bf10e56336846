"""Training within a budget of steps and of seconds."""

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from ._data import is_target, Packed
from ._mesh import replicated
from ._model import cast, GPT, mean_loss


@dataclasses.dataclass
class History:
    """What a run has measured: losses in nats per byte, at steps counted from 0 (before the first)."""

    train: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    validation: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How to train. The learning rate warms up over `warmup` of the budget, and falls along a cosine to a tenth."""

    steps: int = 500
    seconds: float = 110.0
    batch: int = 4
    evaluations: int = 8
    learning_rate: float = 3e-3
    warmup: float = 0.05
    dtype: str = "float32"
    seed: int = 0
    stop_at: int | None = None
    """Stop after so many steps, before the budget is used up."""

    def rate(self, progress: float) -> float:
        """The learning rate when the part `progress` of the budget is used up."""
        fall = 0.55 + 0.45 * math.cos(math.pi * progress)
        return self.learning_rate * min(1.0, (progress + 1e-2) / self.warmup) * fall


OPTIMISER = optax.chain(
    optax.clip_by_global_norm(1.0), optax.scale_by_adam(b1=0.9, b2=0.98), optax.add_decayed_weights(0.05)
)


def init_optimiser(model: GPT) -> Any:
    """The state of `OPTIMISER` before the first step."""
    return OPTIMISER.init(eqx.filter(model, eqx.is_inexact_array))


@eqx.filter_jit(donate="all-except-first")
def train_step(batch, model: GPT, state):
    """One update. `batch` is tokens, segment ids, learning rate, and the dtype to compute in."""
    tokens, segment_ids, rate, dtype = batch
    loss, grads = eqx.filter_value_and_grad(lambda model: mean_loss(cast(model, dtype), tokens, segment_ids))(model)
    updates, state = OPTIMISER.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
    model = eqx.apply_updates(model, jax.tree.map(lambda update: -rate * update, updates))
    return loss, *replicated((model, state))


@eqx.filter_jit
def _batch_loss(model: GPT, tokens, segment_ids):
    return mean_loss(model, tokens, segment_ids)


def evaluate(model: GPT, data: Packed, batch: int, dtype="float32") -> float:
    """Mean loss over all of `data`, in nats per byte."""
    model = cast(model, dtype)
    total, count = 0.0, 0
    for start in range(0, len(data.tokens), batch):
        part = data.batch(
            np.arange(start, start + batch) % len(data.tokens)
        )  # the last one wraps: one shape to compile
        part.segment_ids[max(0, len(data.tokens) - start) :] = 0
        weight = int(is_target(part.segment_ids).sum())
        total += float(_batch_loss(model, part.tokens, part.segment_ids)) * weight
        count += weight
    return total / count


def fit(
    model: GPT,
    train: Packed,
    validation: Packed,
    recipe: Recipe,
    report: Callable[[int, float, History], None],
    keep: Callable[[GPT, Any, History], None] = lambda *_: None,
    earlier: tuple[Any, History] | None = None,
) -> tuple[GPT, History]:
    """Trains until the steps or the seconds are used up.

    `report(step, progress, history)` is called after each step, `keep(model, optimiser state, history)` after each
    evaluation. `earlier` is what `keep` got: the run goes on from there, with the same batches as without a break.
    """
    state, history = (init_optimiser(model), History()) if earlier is None else earlier
    started = time.monotonic() - history.seconds
    step = history.train[-1][0] if history.train else 0
    progress = min(1.0, step / recipe.steps)
    evaluated = math.floor(progress * recipe.evaluations) if history.validation else -1
    while True:
        ended = progress >= 1 or step == recipe.stop_at
        evaluates = ended or math.floor(progress * recipe.evaluations) > evaluated
        if evaluates:
            evaluated = math.floor(progress * recipe.evaluations)
            history.validation.append((step, evaluate(model, validation, 2 * recipe.batch, recipe.dtype)))
        history.seconds = time.monotonic() - started
        report(step, progress, history)
        if evaluates:
            keep(model, state, history)
        if ended:
            return model, history
        # Of the step alone, so that a run that was interrupted goes on with what it would have seen.
        rows = train.batch(np.random.default_rng((recipe.seed, step)).integers(len(train.tokens), size=recipe.batch))
        rate = jnp.asarray(recipe.rate(progress), jnp.float32)
        loss, model, state = train_step((rows.tokens, rows.segment_ids, rate, recipe.dtype), model, state)
        step += 1
        history.train.append((step, float(loss)))
        progress = min(1.0, max(step / recipe.steps, (time.monotonic() - started) / recipe.seconds))
