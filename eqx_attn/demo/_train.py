"""Training within a budget of steps and of seconds."""

import dataclasses
import math
import time
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from ._data import is_target, Packed
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

    def rate(self, progress: float) -> float:
        """The learning rate when the part `progress` of the budget is used up."""
        fall = 0.55 + 0.45 * math.cos(math.pi * progress)
        return self.learning_rate * min(1.0, (progress + 1e-2) / self.warmup) * fall


OPTIMISER = optax.chain(
    optax.clip_by_global_norm(1.0), optax.scale_by_adam(b1=0.9, b2=0.98), optax.add_decayed_weights(0.05)
)


@eqx.filter_jit(donate="all-except-first")
def train_step(batch, model: GPT, state):
    """One update. `batch` is tokens, segment ids, learning rate, and the dtype to compute in."""
    tokens, segment_ids, rate, dtype = batch
    loss, grads = eqx.filter_value_and_grad(lambda model: mean_loss(cast(model, dtype), tokens, segment_ids))(model)
    updates, state = OPTIMISER.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
    return loss, eqx.apply_updates(model, jax.tree.map(lambda update: -rate * update, updates)), state


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
    model: GPT, train: Packed, validation: Packed, recipe: Recipe, report: Callable[[int, float, History], None]
) -> tuple[GPT, History]:
    """Trains until the steps or the seconds are used up.

    `report(step, progress, history)` is called after each step.
    """
    started = time.monotonic()
    order = np.random.default_rng(recipe.seed)
    state = OPTIMISER.init(eqx.filter(model, eqx.is_inexact_array))
    history = History()
    step, progress = 0, 0.0
    while True:
        if progress >= len(history.validation) / recipe.evaluations or progress >= 1:
            history.validation.append((step, evaluate(model, validation, 2 * recipe.batch, recipe.dtype)))
        history.seconds = time.monotonic() - started
        report(step, progress, history)
        if progress >= 1:
            return model, history
        rows = train.batch(order.integers(len(train.tokens), size=recipe.batch))
        rate = jnp.asarray(recipe.rate(progress), jnp.float32)
        loss, model, state = train_step((rows.tokens, rows.segment_ids, rate, recipe.dtype), model, state)
        step += 1
        history.train.append((step, float(loss)))
        progress = min(1.0, max(step / recipe.steps, (time.monotonic() - started) / recipe.seconds))
