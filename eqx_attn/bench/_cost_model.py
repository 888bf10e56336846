"""How long causal self-attention with a context takes: work over the kernels' speed, bytes over the links'.

Devices keep step: a hop takes as long as the slowest of them computes, or as its messages travel. For every order here that is
exact, since one device is the slowest in all hops. The kernels' speed is an input, of one device at a length like that of a
device's share, and does not change with the length; that of shares too short to fill a device is lower.
"""

import dataclasses

from ..sharding._context import OrderName, Strategy

_WIDE = 4
"""Bytes of a number in partial results and in gradients that are summed: float32."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """What was measured: TFLOP/s of the kernels on one device; GB/s of one device's links, each way; seconds a message.

    `memory` is GB/s of a device's memory, which the sums of partial results take.
    """

    forward: float
    backward: float
    link: float
    latency: float
    memory: float

    def message(self, size: float) -> float:
        """Seconds until `size` bytes have arrived."""
        return self.latency + size / (1e9 * self.link)

    def summed(self, size: float) -> float:
        """Seconds to add `size` bytes to as many: two reads and a write."""
        return 3 * size / (1e9 * self.memory)


@dataclasses.dataclass(frozen=True)
class Work:
    """Causal self-attention of one sequence."""

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    itemsize: int = 2

    @property
    def flops(self) -> float:
        """Of the forward's visible scores; the backward has 2.5 times as many."""
        return 2.0 * self.heads * self.head_dim * self.tokens**2

    def queries(self, devices: int) -> float:
        """Numbers in one device's queries, or in its output."""
        return self.tokens / devices * self.heads * self.head_dim

    def keys(self, devices: int) -> float:
        """Numbers in one device's keys, or in its values."""
        return self.tokens / devices * self.kv_heads * self.head_dim


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Seconds of a forward, and of forward and backward; parts of one device's speed that remain; the part not computing."""

    forward: float
    both: float
    forward_efficiency: float
    efficiency: float
    exposed: float


def predict(work: Work, machine: Machine, devices: int, strategy: Strategy, order: OrderName) -> Prediction:
    """Raises ValueError where query heads do not divide over the devices of `"all_to_all"`."""
    if strategy == "all_to_all" and work.heads % devices:
        raise ValueError(
            f"strategy 'all_to_all' gives {devices} devices equally many heads, and there are {work.heads}"
        )
    alone = (work.flops / (1e12 * machine.forward), 2.5 * work.flops / (1e12 * machine.backward))
    shares = _shares(devices, "dual_chunk" if strategy == "all_to_all" else order)
    seconds = dict(ring=_ring, all_gather=_all_gather, all_to_all=_all_to_all)[strategy]
    forward, backward = seconds(work, machine, devices, *([share * x for share in shares] for x in alone))
    both, computing = forward + backward, sum(shares) * sum(alone)
    return Prediction(
        forward=forward,
        both=both,
        forward_efficiency=alone[0] / devices / forward,
        efficiency=sum(alone) / devices / both,
        exposed=1 - computing / both,
    )


def _shares(devices: int, order: OrderName) -> list[float]:
    """For each hop, the part of all scores that the slowest device computes.

    In contiguous order the last device sees half of its own keys, and in each later hop all keys, while others are idle.
    """
    if order == "contiguous":
        return [1 / devices**2] + [2 / devices**2] * (devices - 1)
    return [1 / devices**2] * devices


def _ring(work: Work, machine: Machine, devices: int, forward: list[float], backward: list[float]):
    """Keys and values travel behind each hop but the last, the gradients of the hop before behind each but the first.

    Those of the last hop travel alone.
    """
    keys, queries = work.keys(devices), work.queries(devices)
    sent = 2 * machine.message(keys * work.itemsize)
    returned = 2 * machine.message(keys * _WIDE)
    last = devices - 1
    ahead = sum(max(compute, sent * (hop < last)) for hop, compute in enumerate(forward))
    behind = sum(max(compute, sent * (hop < last) + returned * (hop > 0)) for hop, compute in enumerate(backward))
    merges = last * machine.summed(queries * _WIDE)
    sums = last * machine.summed((queries + 2 * keys) * _WIDE)
    return ahead + merges, behind + returned * (last > 0) + sums


def _all_gather(work: Work, machine: Machine, devices: int, forward: list[float], backward: list[float]):
    """Nothing starts before all keys and values are there, in either direction; their gradients are scattered at the end."""
    others = work.keys(devices) * (devices - 1)
    gathered = 2 * machine.message(others * work.itemsize) * (devices > 1)
    scattered = 2 * machine.message(others * _WIDE) * (devices > 1)
    return gathered + sum(forward), gathered + sum(backward) + scattered


def _all_to_all(work: Work, machine: Machine, devices: int, forward: list[float], backward: list[float]):
    """Query, key, value and output change hands; then output, its cotangent and the three gradients."""
    away = (devices - 1) / devices
    query = machine.message(away * work.queries(devices) * work.itemsize)
    key = machine.message(away * work.keys(devices) * max(1, devices / work.kv_heads) * work.itemsize)
    exchanged = 2 * (query + key) * (devices > 1)
    returned = (3 * query + 2 * key) * (devices > 1)
    return exchanged + sum(forward), returned + sum(backward)
