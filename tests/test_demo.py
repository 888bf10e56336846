"""The demo's parts on small sizes; the whole of it is `make demo`."""

import dataclasses
import functools
import io
import json
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from eqx_attn.demo import __main__ as command, _data, _run, _sample, _train
from eqx_attn.demo._model import GPT, mean_loss


@pytest.fixture(autouse=True)
def _standard_promotion():
    """Optax's Adam counts in integers and raises floats to that power."""
    with jax.numpy_dtype_promotion("standard"):
        yield


_loss = eqx.filter_jit(mean_loss)


@functools.cache
def _text():
    return _data.load(65, validation_rows=8)


def _model(**options):
    return GPT(_data.VOCABULARY, 16, 2, 2, 1, **options, key=jax.random.key(0))


def test_documents_are_packed_whole():
    documents = [bytes([_data.START]) + bytes([65 + i]) * n for i, n in enumerate((30, 5, 17, 40, 1, 22, 9))]
    packed = _data.pack(documents, 41)
    found = []
    for tokens, ids in zip(packed.tokens, packed.segment_ids, strict=True):
        assert list(ids[ids > 0]) == sorted(ids[ids > 0]) and np.all(tokens[ids == 0] == 0)
        found += [bytes(tokens[ids == i].astype(np.uint8)) for i in range(1, ids.max() + 1)]
    assert sorted(found) == sorted(documents)
    assert len(packed.tokens) < len(documents)


def test_text_is_packed_tightly_and_divided():
    train, validation = _text()
    assert train.tokens.shape[1] == validation.tokens.shape[1] == 65 and len(validation.tokens) == 8
    assert (train.segment_ids > 0).mean() > 0.95
    assert train.segment_ids.max(axis=1).mean() > 1.5  # several documents in a row
    pieces = {
        name: {bytes(row[ids == 1].astype(np.uint8)) for row, ids in zip(part.tokens, part.segment_ids, strict=True)}
        for name, part in (("train", train), ("validation", validation))
    }
    # Rows are short here, so that a piece can be no more than an indentation, which any two texts share.
    assert not {piece for piece in pieces["train"] & pieces["validation"] if len(piece.strip(b"\x00 \n")) > 20}


def test_unigram_loss_is_the_cross_entropy_of_frequencies():
    ids = np.ones((1, 5), np.int32)
    train = _data.Packed(np.array([[0, 1, 1, 2, 3]], np.int32), ids)
    validation = _data.Packed(np.array([[0, 1, 2, 2, 7]], np.int32), np.array([[1, 1, 1, 2, 2]], np.int32))
    # Targets are 1 and 2 of the first document and 7 of the second; counts have one added for each of 256 bytes.
    expected = -np.mean(np.log(np.array([3, 2, 1]) / 260))
    assert _data.unigram_loss(train, validation) == pytest.approx(expected)


def test_loss_counts_each_document_alone():
    """A packed row has the loss of its documents one by one, weighted by their targets."""
    model = _model()
    documents = [bytes([0]) + b"attention", bytes([0]) + b"a key", bytes([0]) + b"queries"]
    packed = _data.pack(documents, 40)
    assert len(packed.tokens) == 1
    total = sum(
        float(_loss(model, *_as_rows(_data.pack([document], 40)))) * (len(document) - 1) for document in documents
    )
    loss = float(_loss(model, *_as_rows(packed)))
    assert loss == pytest.approx(total / sum(len(document) - 1 for document in documents), rel=1e-5)


def _as_rows(packed):
    return jnp.asarray(packed.tokens), jnp.asarray(packed.segment_ids)


def test_evaluate_does_not_depend_on_the_batch():
    model, (_, validation) = _model(), _text()
    assert _train.evaluate(model, validation, 8) == pytest.approx(_train.evaluate(model, validation, 5), rel=1e-5)


def test_fit_learns_and_keeps_to_its_steps():
    train, validation = _text()
    recipe = _train.Recipe(steps=12, seconds=600.0, batch=4, evaluations=2, learning_rate=1e-2)
    calls = []
    _, history = _train.fit(_model(), train, validation, recipe, lambda *arguments: calls.append(arguments))
    assert [step for step, _ in history.train] == list(range(1, 13))
    assert [step for step, _ in history.validation] == [0, 6, 12]
    assert history.validation[-1][1] < history.validation[0][1] - 0.5
    assert len(calls) == 13 and calls[-1][1] == 1.0


def test_fit_keeps_to_its_seconds():
    train, validation = _text()
    _, history = _train.fit(
        _model(), train, validation, _train.Recipe(steps=10**6, seconds=1e-3, batch=4), lambda *_: None
    )
    assert len(history.train) == 1 and len(history.validation) == 2


def test_bfloat16_step_keeps_float32_parameters():
    train, _ = _text()
    model = _model()
    state = _train.OPTIMISER.init(eqx.filter(model, eqx.is_inexact_array))
    rows = train.batch(np.arange(4))
    batch = (rows.tokens, rows.segment_ids, jnp.float32(1e-3), "bfloat16")
    loss, model, _ = _train.train_step(batch, model, state)
    assert {x.dtype for x in jax.tree.leaves(eqx.filter(model, eqx.is_array))} == {jnp.dtype(jnp.float32)}
    assert loss.dtype == jnp.float32 and bool(jnp.isfinite(loss))


def test_model_takes_another_attention():
    """How a benchmark compares: the same model around equinox's layer, with a dense mask."""

    class EquinoxAttention(eqx.Module):
        mha: eqx.nn.MultiheadAttention
        rope: eqx.nn.RotaryPositionalEmbedding

        def __call__(self, query, key, value, mask):
            rope = jax.vmap(self.rope, in_axes=1, out_axes=1)
            return self.mha(query, key, value, mask, process_heads=lambda q, k, v: (rope(q), rope(k), v))

    def attention(width, num_heads, num_kv_heads, key):
        assert num_kv_heads == num_heads
        mha = eqx.nn.MultiheadAttention(num_heads, width, key=key)
        return EquinoxAttention(mha, eqx.nn.RotaryPositionalEmbedding(width // num_heads))

    def dense_mask(ids):
        return jnp.tril(ids[:, None] == ids[None, :])

    eqx.clear_caches()
    theirs = GPT(256, 16, 2, 2, attention=attention, make_mask=dense_mask, key=jax.random.key(0))
    ours = GPT(256, 16, 2, 2, key=jax.random.key(0))
    tokens, ids = _as_rows(_text()[0].batch(np.arange(3)))
    assert float(_loss(ours, tokens, ids)) == pytest.approx(float(_loss(theirs, tokens, ids)), rel=1e-5)


def test_sample_continues_the_prompt():
    text = _sample.sample(_model(), "The ", 24)
    assert text.startswith("The ") and text == _sample.sample(_model(), "The ", 24)
    assert text != _sample.sample(_model(), "The ", 24, seed=1)


@pytest.mark.parametrize("end, status", [(2.0, 0), (2.2, 1), (3.5, 1)])
def test_verdict(end, status):
    """Under both by 1.0: the unigram baseline is 3.1, so 2.2 is not enough."""
    console = Console(file=io.StringIO(), width=200)
    history = _train.History(train=[(1, 3.0)], validation=[(0, 5.5), (1, end)])
    assert _run.verdict(console, history, unigram=3.1) == status
    assert ("NOT REACHED" in console.file.getvalue()) == (status == 1)


def test_command_from_end_to_end(tmp_path, capsys):
    arguments = ["--steps", "2", "--width", "16", "--depth", "1", "--length", "64", "--batch", "2"]
    assert command.main([*arguments, "--output", str(tmp_path / "new")]) == 1
    shown = capsys.readouterr().out.replace("\n", "")  # lines are wrapped to the terminal
    for part in ("unigram baseline", "xla", "step     0", "validation loss", "a sample", "loss.png", "NOT REACHED"):
        assert part in shown
    assert (tmp_path / "new" / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_on_a_mesh_goes_on_with_fewer_devices(tmp_path, capsys):
    """Eight devices, then four, against one: float32 losses that differ by no more than sums in another order do."""
    arguments = ["--steps", "4", "--width", "16", "--depth", "1", "--length", "64", "--batch", "2", "--seconds", "900"]
    arguments += ["--output", str(tmp_path)]

    def run(name, *more):
        path = tmp_path / "runs" / name
        status = command.main([*arguments, "--checkpoint", str(path), *more])
        with path.open("rb") as file:
            return status, json.loads(file.readline())["history"]

    status, eight = run("eight", "--mesh", "data=2,context=4", "--stop-at", "2")
    assert status == 0 and "stopped at step 2 of 4" in capsys.readouterr().out
    status, four = run("four", "--mesh", "data=2,context=2", "--resume", str(tmp_path / "runs" / "eight"))
    shown = capsys.readouterr().out.replace("\n", "")
    assert status == 1 and "resumed at step 2" in shown and "a sample" in shown
    _, unbroken = run("unbroken")
    assert four["validation"][: len(eight["validation"])] == eight["validation"]
    for losses in ("train", "validation"):
        wanted = np.array(unbroken[losses])
        assert wanted[-1, 0] == 4
        np.testing.assert_allclose(four[losses], wanted, rtol=1e-5)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--mesh", "data=3"], "--batch 4 is no multiple of data=3"),
        (["--mesh", "context=3"], "--length 256 is no multiple of 6"),
        (["--mesh", "data=4,context=4"], "takes 16 devices, and JAX has 8"),
        (["--resume", __file__], "is no checkpoint of this demo"),
        (["--resume", "absent"], "cannot be read"),
        (["--num-heads", "2", "--num-kv-heads", "3"], "num_kv_heads must divide"),
        (["--width", "6", "--num-heads", "2"], "embedding_size is 3"),
        (["--implementation", "triton", "--width", "16"], "triton"),
    ],
)
def test_mistakes_are_explained_without_a_traceback(arguments, message, tmp_path, capsys):
    assert command.main([*arguments, "--output", str(tmp_path)]) == 2
    shown = capsys.readouterr().err
    assert message in shown and "Traceback" not in shown


def test_unusable_output_folder(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert command.main(["--output", str(tmp_path / "file")]) == 2
    assert "--output" in capsys.readouterr().err


def test_missing_package_names_the_extra(monkeypatch, capsys):
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None if name == "optax" else object())
    assert command.main([]) == 2
    assert "needs optax (the optimiser)" in (shown := capsys.readouterr().err) and "eqx_attn[dev]" in shown


@pytest.mark.parametrize(
    "arguments",
    [
        ["--steps", "0"],
        ["--seconds", "-1"],
        ["--dtype", "int8"],
        ["--implementation", "cudnn"],
        ["--mesh", "rows=2"],
        ["--what"],
    ],
)
def test_command_refuses(arguments, capsys):
    with pytest.raises(SystemExit) as refused:
        command.main(arguments)
    assert refused.value.code == 2 and arguments[0] in capsys.readouterr().err


def test_help_is_enough():
    shown = subprocess.run(
        [sys.executable, "-m", "eqx_attn.demo", "--help"], capture_output=True, text=True, check=True
    )
    for option in dataclasses.fields(_run.Options):
        assert "--" + option.name.replace("_", "-") in shown.stdout
    assert "Exit status" in shown.stdout
