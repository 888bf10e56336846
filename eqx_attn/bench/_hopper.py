"""`--cases hopper`: our kernels, the published ones and a matrix product by turns in the same traces."""

import concurrent.futures
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ._case import Case
from ._environment import commit, device_kind, versions
from ._hopper_cases import described, sizes
from ._hopper_rows import MATMUL, merge, Row, rows_of
from ._implementations import difference, Implementation, ours
from ._numerics import tolerance
from ._peers import peer, Refused
from ._run import _Compiled, _samples, _SECONDS_PER_REPEAT

OURS = ("gluon_hopper", "triton", "xla")
_REFERENCES = ("triton", "gluon_hopper")  # what the others are compared with, the first that serves the case
_DETERMINISTIC = " deterministic"
_GRADIENTS = {"query": "dq", "key": "dk", "value": "dv", "bias": "dbias", "sinks": "dsinks"}


@dataclasses.dataclass
class Variant:
    """One implementation; of ours a second one, of the backward alone, asks for equal bits from run to run.

    `differences` are those of its results from the reference's, by name, and `faults` the ones that rounding does not explain.
    """

    implementation: Implementation
    deterministic: bool = False
    compiled: dict[str, Callable] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    differences: dict[str, float] = dataclasses.field(default_factory=dict)
    faults: list[str] = dataclasses.field(default_factory=list)

    @property
    def label(self) -> str:
        """Tells variants of a case apart."""
        return self.implementation.name + (_DETERMINISTIC if self.deterministic else "")

    def compile(self, arguments: tuple[Any, ...]) -> None:
        """Both directions, or for the deterministic variant, whose forward is the other's, the backward's alone."""
        started = time.perf_counter()
        functions = {"both": self.implementation.both()}
        if not self.deterministic:
            functions["forward"] = self.implementation.forward()
        for what, function in functions.items():
            self.compiled[what] = function.lower(*arguments, self.implementation.rest).compile()
        self.seconds = time.perf_counter() - started


def run(
    cases: dict[str, Case],
    names: tuple[str, ...],
    peers: tuple[str, ...],
    repeats: int,
    jobs: int,
    path: Path,
    given_commit: str | None,
) -> tuple[list[Row], list[str]]:
    """Times all cases; returns the rows and what went wrong. The file is written after each case.

    `names` are those of our implementations. What refuses a case is left out with a printed line.
    """
    say = lambda text: print(text, flush=True)
    measured = dict(device=device_kind(), versions=versions(), commit=commit(given_commit))
    rows: list[Row] = []
    wrong: list[str] = []
    started = time.perf_counter()
    for number, (name, case) in enumerate(cases.items(), 1):
        say(f"{name} ({number} of {len(cases)}): {case}")
        try:
            found, faults = time_case(name, case, names, peers, repeats, jobs, say)
        except Exception as error:  # One case must not end the run over all of them.
            found, faults = [], [f"{name}: {one_line(error)}"]
        wrong += faults
        for fault in faults:
            say(f"WARNING {fault}")
        rows += found
        merge(path, [dataclasses.asdict(row) | measured for row in found], described({name: case}))
        say(f"{name}: {time.perf_counter() - started:.0f} s so far")
    return rows, wrong


def time_case(
    name: str,
    case: Case,
    names: tuple[str, ...],
    peers: tuple[str, ...],
    repeats: int,
    jobs: int,
    say: Callable[[str], None],
) -> tuple[list[Row], list[str]]:
    """The rows of one case, and what is wrong with its results."""
    variants, refusals = candidates(case, names, peers)
    arrays, cotangents = case.arrays()
    working, failures = compile_all(variants, (arrays, cotangents), jobs)
    timed, more = warm_up(working, case, (arrays, cotangents))
    left_out = refusals | failures | more
    for label, reason in left_out.items():
        if label.removesuffix(_DETERMINISTIC) == label or label.removesuffix(_DETERMINISTIC) not in left_out:
            say(f"{name}: {label} left out: {reason}")
    slowest = max(working, key=lambda variant: variant.seconds, default=None)
    if slowest is not None:
        say(f"{name}: compiled, {slowest.seconds:.1f} s for {slowest.label}")
    entries = [_matmul(), *timed.values()]
    samples, profiled = _samples(entries, repeats, lambda text: None)
    by_label = {variant.label: variant for variant in working if variant.label in timed}
    flops = {"fwd": case.flops("forward"), "bwd": case.flops("backward"), MATMUL: 2.0 * _matmul_size() ** 3}
    rows = rows_of(name, flops, by_label, samples, "" if profiled else "wall-clock time: no profile of a GPU")
    return rows, [f"{name}: {variant.label}: {fault}" for variant in by_label.values() for fault in variant.faults]


def candidates(case: Case, names: tuple[str, ...], peers: tuple[str, ...]) -> tuple[list[Variant], dict[str, str]]:
    """Ours, with a deterministic backward too, and the peers; those that have not what the case needs with the reason."""
    found = [
        Variant(ours(case, name, name, deterministic=deterministic), deterministic)
        for name in names
        for deterministic in (False, True)
    ]
    refusals = {}
    for name in peers:
        try:
            found.append(Variant(peer(name, case)))
        except Refused as reason:
            refusals[name] = str(reason)
    return found, refusals


def compile_all(variants: list[Variant], arguments: tuple[Any, ...], jobs: int) -> tuple[list[Variant], dict[str, str]]:
    """Those that compile, `jobs` at once, and what the others say. One library's variants are never compiled at once."""
    groups: dict[str, list[Variant]] = {}
    for variant in variants:
        groups.setdefault(variant.implementation.name, []).append(variant)
    failures: dict[str, str] = {}

    def compile_group(group: list[Variant]) -> list[Variant]:
        done = []
        for variant in group:
            try:
                variant.compile(arguments)
                done.append(variant)
            except Exception as error:
                failures[variant.label] = one_line(error)
        return done

    if jobs == 1:
        working = [compile_group(group) for group in groups.values()]
    else:
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            working = list(pool.map(compile_group, groups.values()))
    return [variant for group in working for variant in group], failures


def warm_up(
    variants: list[Variant], case: Case, arguments: tuple[Any, ...]
) -> tuple[dict[str, _Compiled], dict[str, str]]:
    """What to time, by label. Runs everything twice, and compares results once with those of the reference."""
    order = [name for name in _REFERENCES if any(x.label == name for x in variants)]
    reference = order[0] if order else variants[0].label if variants else ""
    variants = sorted(variants, key=lambda variant: variant.label != reference)
    wanted: dict[str, Array] = {}
    timed, failures = {}, {}
    for variant in variants:
        entry = _Compiled(variant.implementation)
        if variant.deterministic:
            entry.implementation = dataclasses.replace(variant.implementation, name=variant.label)
        try:
            found = _run_twice(variant, entry, arguments)
        except Exception as error:
            failures[variant.label] = one_line(error)
            continue
        if wanted:
            compare(variant, found, wanted, case)
        elif not variant.deterministic:  # that one has no forward
            wanted = found
        timed[variant.label] = entry
    return timed, failures


def _run_twice(variant: Variant, entry: _Compiled, arguments: tuple[Any, ...]) -> dict[str, Array]:
    """Results by name; fills the entry with calls and how often a repeat makes them."""
    results: dict[str, Array] = {}
    for what, function in variant.compiled.items():
        call = lambda function=function: function(*arguments, variant.implementation.rest)
        found, _ = jax.block_until_ready(call())
        if what == "forward":
            results["out"] = found[0]
        else:
            results |= {_GRADIENTS[name]: gradient for name, gradient in found.items()}
        entry.runs[what], entry.calls[what] = call, _calls(call)
    return results


def _calls(call: Callable[[], Any]) -> int:
    started = time.perf_counter()
    jax.block_until_ready(call())
    return min(30, max(2, round(_SECONDS_PER_REPEAT / (time.perf_counter() - started))))


def compare(variant: Variant, found: dict[str, Array], wanted: dict[str, Array], case: Case) -> None:
    """Notes how far each result is from the reference's; both round as `tolerance` says, so twice that is right."""
    dim, length = sizes(case)
    for name, got in found.items():
        away = difference(got, wanted[name])
        bound = 2 * tolerance(name, case.dtype, dim, length)
        variant.differences[name] = away
        if not away <= bound:
            variant.faults.append(f"{name} differs from the reference by {away:.1e}, bound {bound:.1e}")


def _matmul() -> _Compiled:
    """A bfloat16 product of square matrices, what the device's matrix units do at best."""
    size = _matmul_size()
    a, b = (jax.random.normal(key, (size, size), jnp.bfloat16) for key in jax.random.split(jax.random.key(5)))
    product = jax.jit(lambda a, b: jnp.dot(a, b, preferred_element_type=jnp.bfloat16))
    entry = _Compiled(Implementation(MATMUL, product, None))
    call = lambda: product(a, b)
    jax.block_until_ready(call())
    entry.runs["forward"], entry.calls["forward"] = call, _calls(call)
    return entry


def _matmul_size() -> int:
    """On anything but a GPU it only shows that the program works."""
    return 8192 if jax.default_backend() == "gpu" else 256


def one_line(error: Exception) -> str:
    """An error's type and the start of what it says."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:240]
