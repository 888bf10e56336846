"""The benchmark program without a GPU: what it counts, what it reads from a profile, what it finds wrong."""

import json
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_attn
from eqx_attn._codegen import KernelSpec
from eqx_attn._context import interpret
from eqx_attn.bench import __main__ as command, _environment, _implementations, _numerics, _profile, _run, _verify
from eqx_attn.bench._case import BlockMap, blocks_of, Case
from eqx_attn.bench._cases import baseline_of, CASES, FEATURES, select, SMOKE


@pytest.fixture(autouse=True)
def _standard_promotion():
    """What users have; optax's Adam needs it too."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.parametrize("name", SMOKE)
def test_masks_and_count_of_a_case_agree(name):
    """The count of visible scores, the dense mask and our own mask say the same; the peer gets the same call."""
    case = SMOKE[name]
    assert int(case.seen().sum()) == case.visible()
    arrays, _ = case.arrays()
    ours, *peers = (x.function(arrays, x.rest)[0][0] for x in _implementations.implementations(case, ("xla",)))
    assert bool(peers) == (not _implementations.lacking(case))
    dense = _implementations.ours(case).function(arrays, (jnp.asarray(case.seen()), case.ours()[1]))[0][0]
    for other in (dense, *peers):
        assert _implementations.difference(ours, other) < 1e-6


@pytest.mark.parametrize("name", [name for name, case in FEATURES.items() if case.layout == "bshd"])
def test_features_are_served_by_triton_and_blocks_counted_as_explained(name):
    case = FEATURES[name]
    arrays, _ = jax.eval_shape(case.arrays)
    mask, dropout = case.ours()
    report = eqx_attn.explain(
        **arrays, mask=mask, dropout=dropout, softcap=case.softcap, return_max_logit=case.max_logit, device="sm_90a"
    )
    assert report.implementation == "triton"
    forward = report.passes[0]
    if forward.blocks.visited is not None:
        found = blocks_of(case.seen(), forward.tile.block_q, forward.tile.block_kv).sum()
        assert found * forward.blocks.examples == forward.blocks.visited


def test_blocks_are_counted():
    seen = np.zeros((5, 7), bool)
    seen[4, 6] = seen[1, 2] = seen[0, 0] = True
    assert blocks_of(seen, 2, 3).tolist() == [[True, False, False], [False, False, False], [False, False, True]]
    assert FEATURES["dense_causal"].visited_blocks() == 32 * 33 // 2
    assert FEATURES["documents_512"].visited_blocks() == 8 * 10
    assert FEATURES["window_512"].visited_blocks() == 32 * 5 - 10
    assert 0.45 < FEATURES["block_sparse"].visited_blocks() / 528 < 0.6
    assert BlockMap(16).seen(96).diagonal().all()


def test_flops():
    assert Case(4, 4096, 16, 128, mask="full").flops("forward") == 4 * 4 * 16 * 128 * 4096**2
    case = CASES["packed_16k"]
    assert sum(case.documents) == case.seq
    assert case.flops("backward") == 2.5 * 4 * 16 * 128 * sum(n * (n + 1) // 2 for n in case.documents)


def _profile_data(events: str):
    text = f"""
        planes {{
          name: "/device:GPU:0"
          event_metadata {{ key: 1 value {{ id: 1 name: "kernel" }} }}
          event_metadata {{ key: 2 value {{ id: 2 name: "MemcpyH2D" }} }}
          lines {{ name: "Stream #20(Compute)" {events} }}
          lines {{ name: "XLA Ops" events {{ metadata_id: 1 offset_ps: 0 duration_ps: 9000000 }} }}
        }}
        planes {{ name: "/host:CPU" lines {{ name: "Stream" events {{ metadata_id: 1 duration_ps: 5000000 }} }} }}"""
    xspace = jax.profiler.ProfileData.text_proto_to_serialized_xspace(text)
    return jax.profiler.ProfileData.from_serialized_xspace(xspace)


def _event(start_us: float, duration_us: float, kind: int = 1) -> str:
    start, duration = int(start_us * 1e6), int(duration_us * 1e6)
    return f"events {{ metadata_id: {kind} offset_ps: {start} duration_ps: {duration} }}"


def test_busy_times_are_told_apart_by_pauses():
    """Overlapping kernels count once, copies from the host not at all."""
    events = [_event(0, 10), _event(5, 10), _event(100, 5), _event(30_000, 7), _event(30_050, 2, kind=2)]
    assert _profile.busy_groups(_profile_data(" ".join(events))) == pytest.approx([20e3, 7e3])


def test_a_trace_without_a_gpu_gives_no_times():
    assert _profile.busy_times([lambda: jnp.ones(3)], [1]) is None


def test_rows_take_the_forward_off_and_compare_with_cudnn():
    case = SMOKE["smoke_causal"]
    compiled = [
        _run._Compiled(_implementations.Implementation(name, abs, None)) for name in ("eqx_attn", "cudnn", "xla")
    ]
    compiled[2].error = "wrong"
    samples = {
        ("eqx_attn", "forward"): [1e-3, 2e-3, 3e-3],
        ("eqx_attn", "both"): [4e-3, 6e-3, 5e-3],
        ("cudnn", "forward"): [1e-3] * 3,
        ("cudnn", "both"): [7e-3] * 3,
        ("xla", "forward"): [1e-3] * 3,
    }
    rows = {(row.implementation, row.direction): row for row in _run._rows("x", case, compiled, samples, True)}
    assert rows["eqx_attn", "backward"].milliseconds == pytest.approx(3.0)
    assert rows["eqx_attn", "forward"].ratio_to_cudnn == pytest.approx(0.5)
    assert rows["eqx_attn", "backward"].ratio_to_cudnn == pytest.approx(2.0)
    assert rows["xla", "forward"].milliseconds is None and rows["xla", "forward"].note == "wrong"
    assert rows["cudnn", "forward"].tflops == pytest.approx(case.flops("forward") / 1e9)


def test_program_from_end_to_end(tmp_path, capsys):
    output, picture = tmp_path / "new" / "results.json", tmp_path / "plots" / "results.png"
    arguments = ["--cases", "smoke_causal", "--peers", "cudnn,xla", "--repeats", "2", "--commit", "abc"]
    assert command.main([*arguments, "--output", str(output), "--plot", str(picture)]) == 0
    results = json.loads(output.read_text())
    rows = {(row["implementation"], row["direction"]): row for row in results["rows"]}
    assert len(rows) == 6 and results["commit"] == "abc"
    assert rows["xla", "forward"]["milliseconds"] > 0 and "wall-clock" in rows["xla", "forward"]["note"]
    assert rows["cudnn", "forward"]["milliseconds"] is None and rows["cudnn", "forward"]["note"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "smoke_causal" in capsys.readouterr().out


def test_costs_of_a_feature(tmp_path, capsys, monkeypatch):
    """Every function forward takes 1 ms and both directions 3 ms, the baseline half of that: it comes last."""
    times = lambda functions, counts: [1e-3, 3e-3] * (len(functions) // 2 - 1) + [5e-4, 1.5e-3]
    monkeypatch.setattr(_run, "busy_times", times)
    output, picture = tmp_path / "results.json", tmp_path / "results.png"
    arguments = ["--cases", "smoke_options", "--repeats", "2", "--output", str(output), "--plot", str(picture)]
    assert command.main(arguments) == 0
    forward, backward = json.loads(output.read_text())["rows"]
    assert forward["milliseconds"] == pytest.approx(1.0) and backward["milliseconds"] == pytest.approx(2.0)
    assert forward["cost"] == backward["cost"] == pytest.approx(2.0)
    assert 0 < forward["difference"] < 1e-6 and "no softcap" in forward["note"]
    assert picture.read_bytes().startswith(b"\x89PNG") and "cost/blocks" in capsys.readouterr().out


def test_proportion_is_the_cost_by_visited_blocks():
    rows = [
        _run.Row("x", direction, "eqx_attn", milliseconds=ms) for direction, ms in (("forward", 1), ("backward", 4))
    ]
    samples = {("baseline", "forward"): [4e-3], ("baseline", "both"): [12e-3]}
    case = FEATURES["documents_512"]
    baseline = baseline_of("documents_512")
    assert baseline is not None
    forward, backward = _run._with_costs(rows, case, baseline, samples)
    assert forward.cost == pytest.approx(0.25) and backward.cost == pytest.approx(0.5)
    assert backward.proportion == pytest.approx(0.5 * 528 / 80)


@pytest.fixture(scope="module")
def compiled():
    """The forward and both directions of the case with all options, ours and `xla`, compiled once for several tests."""
    case = SMOKE["smoke_options"]
    return [(x.forward(), x.both()) for x in (_implementations.ours(case), _implementations.ours(case, "xla"))]


@pytest.mark.parametrize("wrong", ["", "value", "bias", "sinks", "lse"])
def test_check_finds_what_is_wrong(wrong, compiled, monkeypatch):
    """Only the first of two examples is compared, and a wrong gradient or result has no figure."""
    case = SMOKE["smoke_options"]
    (forward, both), (xla_forward, xla_both) = compiled
    xla = types.SimpleNamespace(forward=lambda: xla_forward, both=lambda: xla_both)
    monkeypatch.setattr(_implementations, "ours", lambda *_: xla)

    def changed_forward(*arguments):
        (out, lse), largest = forward(*arguments)
        return (out.at[1:].set(jnp.nan), 1.01 * lse if wrong == "lse" else lse), largest

    def changed_both(*arguments):
        gradients, largest = both(*arguments)
        return {name: 1.01 * x if name == wrong else x for name, x in gradients.items()}, largest

    worst, fault = _implementations.check(case, changed_forward, changed_both)
    assert (worst > 1e-3) == bool(wrong) and ("wrong" in fault) == bool(wrong)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--cases", "hd128_full_4k"], "--cases smoke runs on any device"),
        (["--cases", "hd129"], "--cases hd129 is unknown"),
        (["--cases", "smoke", "--peers", "flash"], "--peers flash is unknown"),
        (["--verify"], "--verify needs a GPU or a TPU"),
        (["--verify", "nothing*", "--interpret"], "matches no checked-in kernel"),
        (["--train-step", "--width", "10", "--heads", "4"], "--width 10 is not a multiple"),
    ],
)
def test_mistakes_are_one_sentence(arguments, message, capsys):
    assert command.main(arguments) == 2
    shown = capsys.readouterr().err
    assert message in shown and "Traceback" not in shown


@pytest.mark.slow
def test_train_step(tmp_path):
    """Both layers, each in its process, start from the same loss, since they are the same model."""
    output = tmp_path / "step.json"
    sizes = ["--length", "48", "--width", "16", "--depth", "1", "--heads", "2", "--steps", "1", "--dtype", "float32"]
    assert command.main(["--train-step", *sizes, "--output", str(output)]) == 0
    layers = json.loads(output.read_text())["layers"]
    assert layers["eqx_attn"]["first_loss"] == pytest.approx(layers["equinox"]["first_loss"], rel=1e-5)
    assert layers["eqx_attn"]["seconds"] > 0


def test_help_and_list(capsys):
    shown = subprocess.run(
        [sys.executable, "-m", "eqx_attn.bench", "--help"], capture_output=True, text=True, check=True
    )
    assert "Exit status" in shown.stdout and "--train-step" in shown.stdout
    assert command.main(["--list"]) == 0 and "packed_16k" in capsys.readouterr().out


def test_select():
    assert select("triton") == CASES and set(select("hd64*,window_16k")) == {
        "hd64_full_4k",
        "hd64_causal_4k",
        "window_16k",
    }


def test_commit_is_what_is_given(monkeypatch):
    monkeypatch.setenv("EQX_ATTN_COMMIT", "from the environment")
    assert _environment.commit("given") == "given" and _environment.commit() == "from the environment"


SPEC = KernelSpec.from_name("triton/bhsd_causal_qk64_v64_segments")


@pytest.mark.slow
def test_verification_has_dead_rows_padding_and_many_segments():
    for shape in _numerics.SHAPES:
        inputs = _numerics.make_inputs(SPEC, shape, "float16")
        alive = jnp.any(inputs.seen[:, 0], axis=-1)
        assert 0 < int(jnp.sum(~alive)) < alive.size / 2
        segments = inputs.operands.segments
        assert segments is not None and len(np.unique(segments.q_ids)) > 3 and int(jnp.min(segments.kv_ids)) == -2


@pytest.mark.parametrize("name, scale", [("dv", 1.02), ("out", 0.99), ("dq", 1.02), ("lse", 1.001)])
def test_comparison_finds_a_wrong_scale(name, scale):
    wanted = jax.random.normal(jax.random.key(0), (2, 4, 50))
    rounded = wanted if name == "lse" else wanted.astype(jnp.bfloat16)
    assert not _numerics.compare(name, rounded, wanted, "bfloat16", 128, 461).fault
    assert _numerics.compare(name, scale * wanted, wanted, "bfloat16", 128, 461).fault


def test_comparison_finds_what_is_not_exact_or_not_finite():
    wanted = jnp.ones((2, 3, 4)).at[0, 0].set(0.0)
    compare = lambda found: _numerics.compare("dq", found, wanted, "bfloat16", 64, 64).fault
    assert not compare(wanted)
    assert "see nothing" in compare(wanted.at[0, 0, 1].set(1e-6))
    assert "not finite" in compare(wanted.at[1, 1, 1].set(jnp.nan))
    lse = jnp.ones((2, 3)).at[0, 0].set(-jnp.inf)
    assert "-inf" in _numerics.compare("lse", jnp.ones((2, 3)), lse, "bfloat16", 64, 64).fault


def test_verification_under_the_interpreter(monkeypatch):
    """A right kernel passes and one with a wrong scale does not."""
    result, shape = _verify.Verified(), _numerics.Shape(30, 41)
    with interpret():
        _verify._verify_call(SPEC, shape, "float16", "here", result)
        assert not result.faults and result.errors["float16"]["dq"] > 0
        right = _numerics.expected
        monkeypatch.setattr(_verify, "expected", lambda inputs: tuple(1.02 * x for x in right(inputs)))
        _verify._verify_call(SPEC, shape, "float16", "here", result)
    assert {fault.split()[1].rstrip(":") for fault in result.faults} == set(
        _numerics.names_of(KernelSpec.from_name(SPEC.name))
    )


def test_record_is_kept_by_digest(tmp_path, monkeypatch):
    (tmp_path / "generated/triton").mkdir(parents=True)
    source = _verify.REPOSITORY / f"generated/{SPEC.name}.py"
    (tmp_path / f"generated/{SPEC.name}.py").write_text(source.read_text())
    monkeypatch.setattr(_verify, "REPOSITORY", tmp_path)
    good = _verify.Verified({"float16": {"out": 1.23456e-4}})
    _verify._record(SPEC.name, good, {SPEC.name, "triton/other"}, {"commit": "abc"})
    entries = json.loads((tmp_path / "generated/VERIFIED.json").read_text())
    assert set(entries) == {SPEC.name}
    assert entries[SPEC.name]["digest"] == _verify.digests(source.read_text())[1]
    (details,) = entries[SPEC.name]["devices"].values()
    assert details["commit"] == "abc" and details["errors"] == {"float16": {"out": 1.2e-4}}
