"""Functions printed for Triton and for JAX against the functions themselves, and how the lines read."""

import importlib.util
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import given, settings, strategies as st

import eqx_attn
from codegen.render import environment
from eqx_attn._codegen import find_program, printer, register
from eqx_attn._mod_evaluate import Evaluation
from eqx_attn._mods import trace_mask_mod, trace_score_mod

N = 16
SIZES = (2, 3, N, N)
TABLE = jnp.asarray(np.random.default_rng(0).uniform(-2, 2, (3, 7)), jnp.float32)
GRID = np.ix_(*(np.arange(n, dtype=np.int32) for n in SIZES))
LEAVES = 5

# An integer, a number of size 2 or less, and a condition, each a function of the arguments. No operation makes an error of its
# operands larger, or a derivative larger than 1, so that errors add up: by one rounding for each operation.


def _integers():
    leaves = st.sampled_from([lambda a: a[2], lambda a: a[3], lambda a: a[4], lambda a: a[4] - a[3]])
    binary = st.sampled_from([jnp.add, jnp.subtract, jnp.minimum, jnp.maximum])
    unary = st.sampled_from(
        [
            lambda x: x // 3,
            lambda x: x % 5,
            lambda x: -x,
            abs,
            lambda x: jnp.clip(x, -2, 4),
            lambda x: x * 3,
            lambda x: jax.lax.rem(x, jnp.int32(4)),
            lambda x: jax.lax.div(x, jnp.int32(2)),
            jnp.sign,
            lambda x: x >> 1,
        ]
    )
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.builds(lambda f, x: lambda a: f(x(a)), unary, inner),
            st.builds(lambda f, x, y: lambda a: f(x(a), y(a)), binary, inner, inner),
        ),
        max_leaves=3,
    )


def _conditions():
    compare = st.sampled_from([jnp.less, jnp.less_equal, jnp.equal, jnp.not_equal, jnp.greater])
    simple = st.builds(lambda f, x, y: lambda a: f(x(a), y(a)), compare, _integers(), _integers())
    join = st.sampled_from([jnp.logical_and, jnp.logical_or, jnp.logical_xor])
    return st.one_of(
        simple,
        st.builds(lambda x: lambda a: ~x(a), simple),
        st.builds(lambda f, x, y: lambda a: f(x(a), y(a)), join, simple, simple),
    )


def _numbers():
    leaves = st.one_of(
        st.just(lambda a: a[0]),
        st.floats(-2, 2, width=16).map(lambda x: lambda a: jnp.float32(x)),
        _integers().map(lambda x: lambda a: TABLE[a[2], jnp.clip(x(a), 0, 6)]),
        _integers().map(lambda x: lambda a: jnp.sin(x(a).astype(jnp.float32))),
    )
    unary = st.sampled_from(
        [
            jnp.tanh,
            jnp.sin,
            jnp.cos,
            jax.nn.sigmoid,
            abs,
            lambda x: -x,
            lambda x: x**2 / 4,
            lambda x: jnp.exp(x - 2),
            lambda x: jnp.log1p(abs(x)),
            lambda x: jnp.sqrt(x + 3) / 2,
            lambda x: jax.nn.softplus(x) / 2,
            lambda x: jax.scipy.special.erf(x) / 2,
            lambda x: 2.0 ** (x - 2),
            lambda x: 1 / (x + 3),
            lambda x: jnp.where(jnp.isfinite(x), x, 0),
        ]
    )
    binary = st.sampled_from(
        [lambda x, y: (x + y) / 2, lambda x, y: (x - y) / 2, lambda x, y: x * y / 2, jnp.minimum, jnp.maximum]
    )
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.builds(lambda f, x: lambda a: f(x(a)), unary, inner),
            st.builds(lambda f, x, y: lambda a: f(x(a), y(a)), binary, inner, inner),
            st.builds(lambda c, x, y: lambda a: jnp.where(c(a), x(a), y(a)), _conditions(), inner, inner),
        ),
        max_leaves=LEAVES,
    )


KERNEL = """
import triton
import triton.language as tl


{helpers}
@triton.jit
def kernel(scores_ptr, TABLE_at, TABLE_1, value_ptr, slope_ptr, N: tl.constexpr):
    rows = tl.arange(0, N)
    q_index = rows[:, None]
    kv_index = rows[None, :]
    batch = tl.program_id(0)
    q_head = tl.program_id(1)
    offsets = ((batch * {heads} + q_head) * N + q_index) * N + kv_index
    scores = tl.load(scores_ptr + offsets)
{lines}
    tl.store(value_ptr + offsets, tl.zeros_like(scores) + ({value}))
    tl.store(slope_ptr + offsets, tl.zeros_like(scores) + ({slope}))
"""


def in_triton(program, scores, folder):
    """Value and slope of a program by its lines in Triton's interpreter."""
    from eqx_attn._triton_call import triton_call

    names = dict(zip(program.kinds, program.kinds, strict=True)) | {"score": "scores"}
    taken = {"rows", "offsets", "N", "kernel"}
    printed = printer.listing(program, [program.value, program.slope], printer.Triton, names, {0: "TABLE"}, taken)
    templates = environment().get_template("triton/mods.jinja").module
    text = KERNEL.format(
        helpers="\n\n".join(getattr(templates, name)() for name in printer.HELPERS),
        heads=SIZES[1],
        lines="\n".join(f"    {line}" for line in printed.lines),
        value=printed.outputs[0],
        slope=printed.outputs[1],
    )
    path = folder / f"printed_{program.digest}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    like = jax.ShapeDtypeStruct(scores.shape, scores.dtype)
    with eqx_attn.interpret():
        return triton_call(
            module.kernel,
            scores,
            TABLE,
            TABLE.shape[1],
            outputs=(like, like),
            grid=SIZES[:2],
            num_warps=1,
            num_stages=1,
            constants=dict(N=N),
        )


def in_jax(program, scores):
    """The same by the lines in the words of jax.numpy."""
    names = dict(zip(program.kinds, program.kinds, strict=True)) | {"score": "scores"}
    printed = printer.listing(program, [program.value, program.slope], printer.Jax, names, {0: "TABLE"})
    known = dict(jax=jax, jnp=jnp, TABLE=TABLE, scores=scores)
    known |= zip(program.kinds[1:], GRID, strict=True)
    exec("\n".join(map(str, printed.lines)), known)
    return tuple(jnp.broadcast_to(eval(text, known), scores.shape) for text in printed.outputs)


def on_grid(function, *scores):
    """A function of scalars at all indices."""
    for axis in reversed(range(4)):
        function = jax.vmap(function, (*(0 for _ in scores), *(0 if axis == n else None for n in range(4))))
    return function(*scores, *(jnp.arange(n, dtype=jnp.int32) for n in SIZES))


@settings(max_examples=12)
@given(expression=_numbers(), seed=st.integers(0, 2**16))
def test_any_expression(expression, seed, tmp_path_factory):
    """Value and derivative: as evaluated on blocks, as printed for JAX, and as printed for Triton."""
    scores = jnp.asarray(np.random.default_rng(seed).uniform(-2, 2, SIZES), jnp.float32)
    wanted = oracle.jit(lambda x: on_grid(jax.value_and_grad(lambda *a: expression(a)), x))(scores)
    program = trace_score_mod(lambda *a: expression(a), SIZES, "float32").program
    arguments = dict(zip(program.kinds, (scores, *map(jnp.asarray, GRID)), strict=True))
    evaluation = Evaluation(program, arguments, [TABLE[None]] * len(program.captures), SIZES[0])
    evaluated = [jnp.broadcast_to(evaluation(x), SIZES) for x in (program.value, program.slope)]
    pytest.importorskip("triton")
    # Of values 2 or less; a derivative is a sum over the leaves that are the score.
    allowed = 2 * LEAVES * (len(program.steps) + 1) * float(jnp.finfo(jnp.float32).eps)
    for found in (evaluated, in_jax(program, scores), in_triton(program, scores, tmp_path_factory.mktemp("printed"))):
        for got, want in zip(found, wanted, strict=True):
            np.testing.assert_allclose(got, want, rtol=0, atol=allowed)


@settings(max_examples=12)
@given(expression=_conditions())
def test_any_condition(expression):
    program = trace_mask_mod([lambda *a: expression((None, *a))], SIZES).program
    wanted = on_grid(lambda *a: expression((None, *a)))
    arguments = dict(zip(program.kinds, map(jnp.asarray, GRID), strict=True))
    found = Evaluation(program, arguments, [], SIZES[0])(program.value)
    np.testing.assert_array_equal(np.broadcast_to(found, SIZES), wanted)


def lines(function, mask=False, language=printer.Triton):
    mod = trace_mask_mod([function], SIZES) if mask else trace_score_mod(function, SIZES, "float32")
    return printer.function_lines(mod.program, language)


slopes, table = jnp.ones(3), jnp.ones((3, 2 * N - 1))


def alibi(score, batch, head, q_index, kv_index):
    return score + slopes[head] * (kv_index - q_index).astype(jnp.float32)


def relative(score, batch, head, q, k):
    distance = k - q
    return score + table[head, distance + N - 1]


def test_lines_read_as_if_written_by_hand():
    """Names from the user's code, no clamps where an index cannot be outside, nothing computed twice."""
    assert lines(alibi) == [
        "slope = tl.load(slopes_at + head)",
        "scores = scores + slope * (kv_index - q_index).to(tl.float32)",
    ]
    assert lines(relative) == [
        "distance = k - q",
        "scores = scores + tl.load(table_at + head * table_1 + (distance + 15))",
    ]
    assert lines(relative, language=printer.Jax)[1] == "scores = scores + table[head, distance + 15]"
    assert lines(lambda score, b, h, q, k: 30 * jnp.tanh(score / 30)) == ["scores = 30.0 * tanh(scores / 30.0)"]
    assert lines(lambda b, h, q, k: (q // 4 == k // 4) & ~(q < k), mask=True) == [
        "keep = (q // 4 == k // 4) & ~(q < k)"
    ]
    # What may be outside is clamped, and what may be negative rounded down.
    assert lines(lambda s, b, h, q, k: s + slopes[q]) == [
        "q_slope = tl.load(slopes_at + tl.minimum(q, 2))",
        "scores = scores + q_slope",
    ]
    assert lines(lambda b, h, q, k: (q - k) // 2 > 1, mask=True) == ["keep = floor_divide(q - k, 2) > 1"]


def test_equal_functions_have_equal_digests():
    """In every process: the digest is of the steps and names; another number is another function."""
    first, second = (trace_score_mod(alibi, SIZES, "float32").program for _ in range(2))
    assert first == second and first.digest == second.digest == register(first)
    assert find_program(first.digest) == first
    other = trace_score_mod(lambda s, b, h, q, k: s * 2, SIZES, "float32").program
    assert other.digest != first.digest
    assert re.fullmatch("[0-9a-f]{12}", other.digest)
