"""The README's examples run, print what it shows, and what it names exists."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

from codegen.__main__ import main as codegen

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.M | re.S)


def test_examples_run_one_after_the_other(capsys):
    names = {}
    for language, text in BLOCKS:
        if language == "python":
            exec(compile(text, "README.md", "exec"), names)
    (shown,) = [text for language, text in BLOCKS if language == "text"]
    assert capsys.readouterr().out == shown
    assert jnp.isfinite(names["result"]) and jnp.any(names["gradient"].query_proj.weight != 0)
    assert names["out"].shape == (2, 128, 8, 64) and names["lse"].shape == (2, 8, 128)


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.stem)
def test_examples_of_the_pages_run(page):
    names = {}
    examples = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S)
    assert examples
    for text in examples:
        exec(compile(text, page.name, "exec"), names)


def test_the_first_example_is_short():
    first = next(text for language, text in BLOCKS if language == "python")
    body = [line for line in first.splitlines() if line.strip() and "import" not in line]
    assert len(body) <= 10


@pytest.mark.parametrize("option", ["--check", "--list", "--explain", "--show", "--diff"])
def test_commands_of_codegen(option, capsys):
    text = "".join(text for language, text in BLOCKS if language == "sh")
    (line,) = [line for line in text.splitlines() if line.startswith(f"python -m codegen {option}")]
    words = [word.strip("'") for word in line.partition("#")[0].split()]
    assert codegen(words[3:]) == 0
    assert capsys.readouterr().out.strip()


def test_what_it_names_exists():
    """Paths in backticks and links; bare file names are of the package, `codegen/` or the templates."""
    named = set(re.findall(r"`([\w<>/.]+/[\w.]*|[\w/]+\.(?:py|jinja|md))`", README)) | set(
        re.findall(r"\]\(((?!http)[^)]+)\)", README)
    )
    folders = [ROOT, *(ROOT / folder for folder in ("eqx_attn", "codegen", "templates/triton", "templates/pallas_tpu"))]
    assert len(named) > 15
    missing = [name for name in named if "<" not in name and not any((folder / name).exists() for folder in folders)]
    assert not missing


def test_every_environment_variable_is_there():
    sources = [path for folder in ("eqx_attn", "codegen") for path in (ROOT / folder).glob("*.py")]
    read = set(re.findall(r"EQX_ATTN_[A-Z_]+", "".join(path.read_text() for path in sources)))
    assert read == set(re.findall(r"EQX_ATTN_[A-Z_]+", README)) and read


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for name in re.findall(r"^make (\w+)", README, re.M) + ["help", "check", "verify", "bench"]:
        assert re.search(rf"^{name}:", makefile, re.M)


@pytest.mark.slow
@pytest.mark.parametrize("script", ["benchmarks/plot_mask.py", "docs/plot_masks.py"])
def test_the_picture_can_be_drawn(script, tmp_path):
    script, path = ROOT / script, tmp_path / "mask.png"
    subprocess.run([sys.executable, script, path], check=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    assert path.read_bytes().startswith(b"\x89PNG")
