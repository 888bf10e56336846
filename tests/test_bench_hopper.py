"""`--cases hopper` without a GPU: its cases, its rows and their file, what peers refuse, and the whole program on a CPU."""

import json
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_attn
from eqx_attn.bench import __main__ as command, _hopper, _hopper_command, _hopper_rows, _implementations, _peers
from eqx_attn.bench._case import Case
from eqx_attn.bench._cases import CASES
from eqx_attn.bench._hopper_cases import Bar, BARS, HOPPER, HOPPER_SMOKE, select_hopper


@pytest.fixture(autouse=True)
def _standard_promotion():
    """What users have."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def test_case_table():
    """The published shapes under their ids, each case with a bar or reported alone."""
    assert [name.replace("-", "_") for name in HOPPER][: len(CASES)] == list(CASES)
    assert {name: case for name, case in HOPPER.items() if name.replace("-", "_") in CASES} == {
        name.replace("_", "-"): case for name, case in CASES.items()
    }
    assert set(HOPPER) - set(BARS) == {"mla-causal-4k", "sinks-window-8k"}
    assert set(BARS) < set(HOPPER)
    assert BARS["hd256-causal-4k"] == Bar(1.19, 1.17, 1.15) and BARS["softcap-8k"].peer == "tokamax"


@pytest.mark.parametrize("name", HOPPER)
def test_attention_takes_each_case(name):
    """The shapes go together, and gradients have them too."""
    case = HOPPER[name]
    implementation = _implementations.ours(case, "xla")
    arrays, cotangents = jax.eval_shape(case.arrays)
    (out,), _ = jax.eval_shape(implementation.forward(), arrays, cotangents, implementation.rest)
    assert out.shape == (case.batch, case.seq, case.q_heads, case.v_dim or case.head_dim) == cotangents[0].shape
    gradients, _ = jax.eval_shape(implementation.both(), arrays, cotangents, implementation.rest)
    assert {name: x.shape for name, x in gradients.items()} == {name: x.shape for name, x in arrays.items()}


def test_flops_of_two_head_dims_and_of_few_queries():
    pairs = 4 * 16 * (4096 * 4097 // 2)
    mla = HOPPER["mla-causal-4k"]
    assert mla.flops("forward") == 2 * (192 + 128) * pairs
    assert mla.flops("backward") == 2 * (3 * 192 + 2 * 128) * pairs
    assert HOPPER["decode-8k"].flops("forward") == 4 * 128 * 8 * 16 * 16 * 8192


def _variant(name, deterministic=False, **rest):
    implementation = _implementations.Implementation(name, abs, None, "a note")
    return _hopper.Variant(implementation, deterministic, **rest)


def test_rows():
    """A deterministic backward takes the forward of the other off; cuDNN and the product are of the same direction and run."""
    variants = [_variant("triton", differences={"out": 1e-3, "dq": 2e-3, "dk": 4e-3}), _variant("triton", True)]
    variants += [_variant("cudnn", faults=["out differs from the reference"])]
    samples = {
        ("matmul", "forward"): [2e-3, 1e-3, 3e-3],
        ("triton", "forward"): [1e-3, 2e-3, 3e-3],
        ("triton", "both"): [4e-3, 6e-3, 5e-3],
        ("triton deterministic", "both"): [5e-3, 8e-3, 11e-3],
        ("cudnn", "forward"): [1e-3] * 3,
        ("cudnn", "both"): [7e-3] * 3,
    }
    flops = {"fwd": 4e9, "bwd": 10e9, "matmul": 100e9}
    rows = _hopper_rows.rows_of("x", flops, {variant.label: variant for variant in variants}, samples, "")
    found = {(row.implementation, row.direction, row.deterministic): row for row in rows}
    assert set(found) == {
        ("matmul", "fwd", None),
        ("triton", "fwd", None),
        ("triton", "bwd", False),
        ("triton", "bwd", True),
        ("cudnn", "fwd", None),
        ("cudnn", "bwd", False),
    }
    default, repeated = found["triton", "bwd", False], found["triton", "bwd", True]
    assert default.ms == pytest.approx(3.0) and repeated.ms == pytest.approx(6.0)
    assert default.of_cudnn == pytest.approx(2.0) and repeated.of_cudnn == pytest.approx(1.0)
    assert default.tflops == pytest.approx(10 / 3) and default.of_matmul == pytest.approx(10 / 3 / 50)
    assert default.difference == 4e-3 and found["triton", "fwd", None].difference == 1e-3
    assert found["triton", "fwd", None].spread == pytest.approx(1.0)
    assert "differs" in found["cudnn", "fwd", None].note and found["matmul", "fwd", None].of_matmul is None


def test_a_file_takes_the_rows_of_a_case_as_a_whole(tmp_path):
    path = tmp_path / "new" / "h200.json"
    row = lambda case, name, device="NVIDIA H200", ms=1.0: dict(case=case, implementation=name, device=device, ms=ms)
    _hopper_rows.merge(path, [row("a", "triton"), row("a", "fa4"), row("b", "triton")], {"a": {"seq": 1}, "b": {}})
    _hopper_rows.merge(path, [row("a", "triton", "NVIDIA H100")], {"a": {"seq": 1}})
    _hopper_rows.merge(path, [row("a", "triton", ms=2.0)], {"a": {"seq": 2}})
    _hopper_rows.merge(path, [], {"c": {}})
    held = json.loads(path.read_text())
    assert held["cases"] == {"a": {"seq": 2}, "b": {}}
    assert held["rows"] == [
        row("b", "triton"),
        row("a", "triton", "NVIDIA H100"),
        row("a", "triton", ms=2.0),
    ]
    assert [file.name for file in path.parent.iterdir()] == ["h200.json"]


def test_bars_that_are_missed():
    row = lambda direction, name, deterministic, ms: _hopper_rows.Row(
        "hd128-full-4k", direction, name, deterministic, ms, 1.0
    )
    rows = [row("fwd", "cudnn", None, 1.05), row("bwd", "cudnn", False, 1.0)]
    rows += [row("fwd", "triton", None, 1.0), row("bwd", "triton", False, 1.0), row("bwd", "triton", True, 1.1)]
    assert _hopper_rows.missed(rows, "triton") == [
        "hd128-full-4k backward: 1.00 of cudnn, at least 1.05",
        "hd128-full-4k deterministic backward: 0.91 of cudnn, at least 0.93",
    ]
    assert _hopper_rows.missed(rows, "gluon_hopper") == []


@pytest.mark.parametrize(
    "name, case, message",
    [
        ("cudnn", Case(1, 64, 2, 64, softcap=2.0), "jax.nn has no softcap"),
        ("cudnn", Case(1, 64, 2, 64, v_dim=128), "128, is wider than the key's, 64"),
        ("jax_xla", Case(1, 64, 2, 192, v_dim=128), "one head dim"),
        ("fa4", Case(1, 64, 2, 64, bias="1hqk", sinks=True), "it has no bias, sinks"),
        ("fa4", HOPPER["hd64-full-4k"], r"fa4_jax cannot be imported .* pip install 'fa4-jax\[cu13\]'"),
        ("fa3", HOPPER["hd64-full-4k"], "head dim 128 only, not 64"),
        ("fa3", HOPPER["hd128-full-4k"], "flash_attn3_jax cannot be imported .*no CUDA.*: pip install"),
        ("tokamax", HOPPER["sinks-window-8k"], "it has no sinks"),
    ],
)
def test_peers_refuse_in_a_sentence(name, case, message, monkeypatch):
    def import_module(module):
        raise OSError(f"{module}: no CUDA\nhere")

    monkeypatch.setattr(_peers.importlib, "import_module", import_module)
    with pytest.raises(_peers.Refused, match=message):
        _peers.peer(name, case)


def _flash(query, key, value, *, causal=False, is_causal=False, window_size=None):
    """What `fa4_jax.flash_attn` and `flash_attn3_jax.flash_mha` document."""
    left, right = (None if window_size in (None, (-1, -1)) else window_size) or (
        None,
        0 if causal or is_causal else None,
    )
    return eqx_attn.attention(
        query, key, value, mask=eqx_attn.SlidingWindow(left, right, "bottom_right"), implementation="reference"
    )


def _flash_varlen(query, key, value, q_offsets, kv_offsets, *, max_seqlen_q=None, max_seqlen_k=None, **options):
    assert q_offsets is kv_offsets and max_seqlen_q in (None, 80)
    spans = [slice(start, end) for start, end in zip(q_offsets[:-1], q_offsets[1:], strict=True)]
    return jnp.concatenate([_flash(*(x[None, span] for x in (query, key, value)), **options)[0] for span in spans])


def _tokamax(query, key, value, *, bias, mask, is_causal, logits_soft_cap, implementation, local_window_size=None):
    assert implementation == "mosaic"
    window = None if local_window_size is None else eqx_attn.SlidingWindow(*local_window_size)
    masks = [window, None if mask is None else mask, eqx_attn.Causal() if is_causal else None]
    (mask,) = [x for x in masks if x is not None] or [eqx_attn.Full()]
    return eqx_attn.attention(
        query, key, value, bias=bias, mask=mask, softcap=logits_soft_cap, implementation="reference"
    )


_MODULES = {
    "fa4_jax": types.SimpleNamespace(flash_attn=_flash, flash_attn_varlen=_flash_varlen),
    "flash_attn3_jax": types.SimpleNamespace(flash_mha=_flash, flash_mha_varlen=_flash_varlen),
    "tokamax": types.SimpleNamespace(dot_product_attention=_tokamax),
}


@pytest.mark.parametrize("name", ["cudnn", "fa4", "fa3", "tokamax"])
@pytest.mark.parametrize(
    "case",
    [
        Case(2, 96, 4, 128, kv_heads=2, dtype="float32"),
        Case(2, 96, 2, 128, mask="full", dtype="float32"),
        Case(2, 96, 2, 128, window=20, dtype="float32"),
        Case(1, 96, 2, 128, documents=(10, 80, 6), dtype="float32"),
        Case(2, 5, 2, 128, kv_seq=96, mask="full", dtype="float32"),
        Case(2, 96, 2, 32, v_dim=16, dtype="float32"),
        Case(1, 96, 2, 32, mask="full", bias="1hqk", dtype="float32"),
        Case(1, 96, 2, 32, softcap=2.0, dtype="float32"),
    ],
    ids=str,
)
def test_peers_get_the_same_call(name, case, monkeypatch):
    """Each peer's own arguments, by what its documentation says they mean, give the result of ours."""
    nn = _implementations.jax_nn
    monkeypatch.setattr(_peers, "jax_nn", lambda peer, case, name=None: nn("xla", case, name))
    monkeypatch.setattr(_peers.importlib, "import_module", _MODULES.__getitem__)
    try:
        implementation = _peers.peer(name, case)
    except _peers.Refused:
        assert case.bias or case.softcap or (name == "fa3" and case.head_dim != 128)
        return
    arrays, _ = case.arrays()
    ours = _implementations.ours(case, "xla")
    (got,), _ = implementation.function(arrays, implementation.rest)
    (wanted,), _ = ours.function(arrays, ours.rest)
    assert implementation.name == name and _implementations.difference(got, wanted) < 2e-6


def test_program_from_end_to_end(tmp_path, capsys):
    """Every implementation has its rows or a line that says why not."""
    output = tmp_path / "rows.json"
    arguments = [
        "--cases",
        "hopper_smoke",
        "--only",
        "smoke-causal,smoke-decode",
        "--ours",
        "triton,xla",
        "--jobs",
        "1",
    ]
    arguments += ["--peers", "cudnn,jax_xla", "--repeats", "2", "--commit", "abc", "--output", str(output)]
    assert command.main(arguments) == 0
    held, shown = json.loads(output.read_text()), capsys.readouterr().out
    assert {"case", "direction", "implementation", "deterministic", "ms", "tflops", "of_cudnn"} < set(held["rows"][0])
    assert all(row["device"] == "cpu" and row["commit"] == "abc" and row["versions"]["jax"] for row in held["rows"])
    forwards = [(row["case"], row["implementation"]) for row in held["rows"] if row["direction"] == "fwd"]
    assert forwards == [
        ("smoke-causal", "matmul"),
        ("smoke-causal", "xla"),
        ("smoke-causal", "jax_xla"),
        ("smoke-decode", "matmul"),
        ("smoke-decode", "xla"),
    ]
    assert all(row["ms"] > 0 for row in held["rows"])
    assert shown.count("triton left out: ValueError: implementation='triton' cannot serve") == 2
    assert "triton deterministic left out" not in shown
    assert "smoke-causal: cudnn left out" in shown and "smoke-decode: jax_xla left out: jax.nn has one head" in shown
    assert held["cases"]["smoke-decode"]["kv_seq"] == 40


def test_what_is_wrong_or_fails_is_told_and_the_others_are_timed(tmp_path, capsys, monkeypatch):
    """A gradient that is 5 % off is named; a case that cannot be made leaves the next one alone."""

    def wrong(case):
        right = _implementations.ours(case, "xla", "jax_xla")

        def function(arrays, rest):
            value = arrays["value"]
            stretched = value + 0.05 * (value - jax.lax.stop_gradient(value))  # the same value, 1.05 times its gradient
            return right.function({**arrays, "value": stretched}, rest)

        return _implementations.Implementation("jax_xla", function, right.rest)

    monkeypatch.setitem(_peers.HOPPER_PEERS, "jax_xla", wrong)
    monkeypatch.setitem(HOPPER_SMOKE, "broken", Case(1, 8, 3, 16, kv_heads=2, dtype="float32"))
    monkeypatch.setattr(_hopper, "_REFERENCES", ("xla",))
    output = tmp_path / "rows.json"
    arguments = ["--cases", "hopper_smoke", "--only", "broken,smoke-causal", "--ours", "xla", "--peers", "jax_xla"]
    assert command.main([*arguments, "--jobs", "2", "--repeats", "1", "--output", str(output)]) == 1
    shown = capsys.readouterr()
    assert "WARNING smoke-causal: jax_xla: dv differs from the reference by 5.0e-02" in shown.out
    assert "dv differs" in shown.err and "dq differs" not in shown.err and "out differs" not in shown.err
    rows = {
        (row["case"], row["implementation"], row["direction"]): row for row in json.loads(output.read_text())["rows"]
    }
    assert rows["smoke-causal", "jax_xla", "fwd"]["difference"] < 1e-6
    assert "broken: xla left out: ValueError" in shown.out and ("smoke-causal", "xla", "fwd") in rows


def test_a_result_without_a_number_is_wrong():
    variant, ones = _variant("cudnn"), jnp.ones((1, 2, 2, 2))
    _hopper.compare(variant, {"out": ones.at[0, 0, 0, 0].set(math.nan)}, {"out": ones}, HOPPER_SMOKE["smoke-causal"])
    assert "out differs from the reference by nan" in variant.faults[0]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--cases", "hopper"], "--cases hopper needs a GPU, and JAX's default backend here is 'cpu'"),
        (
            ["--cases", "hopper", "--only", "hd128-full"],
            "--only hd128-full: --cases hopper has no such case; it has hd128-",
        ),
        (["--cases", "hopper", "--only", ","], "--only names no case"),
        (
            ["--cases", "hopper_smoke", "--peers", "flash"],
            "--peers flash is unknown; known are cudnn, fa4, fa3, tokamax",
        ),
        (
            ["--cases", "hopper_smoke", "--ours", "cudnn"],
            "--ours cudnn is unknown; known are gluon_hopper, triton, xla",
        ),
        (["--cases", "smoke", "--only", "x"], "--only and --ours belong to --cases hopper"),
    ],
)
def test_mistakes_are_one_sentence(arguments, message, capsys):
    assert command.main(arguments) == 2
    shown = capsys.readouterr().err
    assert message in shown and "Traceback" not in shown


def test_selection_and_the_default_file():
    assert list(select_hopper("hopper", "packed-16k, hd128-full-4k")) == ["packed-16k", "hd128-full-4k"]
    assert select_hopper("hopper", None) == HOPPER
    assert _hopper_command.default_output("NVIDIA H200").as_posix() == "benchmarks/h200.json"
    assert _hopper_command.default_output("NVIDIA H100 80GB HBM3").name == "h100_80gb_hbm3.json"


def test_wide_masks_are_not_needed_for_cases_that_have_a_flag():
    """A dense mask of 16k tokens would be a quarter of a gigabyte, and slow: only packed documents have one, for cuDNN."""
    assert [name for name, case in HOPPER.items() if case.documents] == ["packed-16k"]
    assert np.array_equal(Case(1, 2, 1, 8, kv_seq=3, mask="full").seen(), np.ones((2, 3), bool))
