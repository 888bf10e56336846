"""The wheel: what it holds, what it asks for, and that it works in an environment where nothing else is."""

import os
import re
import subprocess
import sys
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Each is hundreds of megabytes, or would look for a device that is not there.
ACCELERATORS = re.compile(r"^(triton|libtpu|jax-cuda.*|jax-rocm.*|nvidia-.*)$")


def run(*command, cwd, **environment):
    """The standard output of a command, which has to succeed; it does not see this checkout."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environment
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{command} failed:\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from the source distribution, so that this is complete as well."""
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT), cwd=folder)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The Python of an environment with the wheel and what pip installs for it, in the versions of this one."""
    folder = tmp_path_factory.mktemp("empty")
    run(sys.executable, "-m", "venv", "--without-pip", "venv", cwd=folder)
    python = folder / "venv" / "bin" / "python"
    pins = folder / "constraints.txt"
    pins.write_text("".join(f"{name}=={version}\n" for name, version in installed_versions().items()))
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-compile"]
    run(*pip, "--constraint", str(pins), str(wheel), cwd=folder)
    return python


def installed_versions():
    """What this environment has: it may be the one with the other jax."""
    lines = run(sys.executable, "-m", "pip", "list", "--format", "freeze", "--exclude-editable", cwd=ROOT)
    return dict(line.split("==") for line in lines.split())


def names(wheel):
    """The files in a wheel."""
    return zipfile.ZipFile(wheel).namelist()


def requirements(wheel):
    """The names of what a wheel requires, by extra; those that are always required under None."""
    (metadata,) = (name for name in names(wheel) if name.endswith(".dist-info/METADATA"))
    found = {}
    for line in message_from_string(zipfile.ZipFile(wheel).read(metadata).decode()).get_all("Requires-Dist"):
        extra = re.search(r"extra == '(\w+)'", line)
        found.setdefault(extra and extra[1], set()).add(re.match(r"[\w.-]+(\[\w+\])?", line)[0])
    return found


def test_the_wheel_adds_one_name_to_site_packages(wheel):
    top = {name.split("/")[0] for name in names(wheel)}
    assert top == {"eqx_attn", "eqx_attn-0.1.0.dist-info"}


@pytest.mark.parametrize("folder", ["codegen", "templates", "generated"])
def test_the_wheel_has_all_that_a_checkout_keeps_beside_the_package(wheel, folder):
    paths = (path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    files = [path.relative_to(ROOT).as_posix() for path in paths]
    assert files
    assert {f"eqx_attn/{file}" for file in files} <= set(names(wheel))


def test_a_plain_install_asks_for_no_accelerator(wheel):
    plain = requirements(wheel)[None]
    assert {"jax", "equinox", "jinja2"} <= plain
    assert not [name for name in plain if ACCELERATORS.match(name) or "[" in name]


def test_extras(wheel):
    found = requirements(wheel)
    assert set(found) == {None, "cuda", "tpu", "dev", "bench", "docs"}
    assert found["cuda"] == {"jax[cuda13]", "triton"}
    assert found["tpu"] == {"jax[tpu]"}


def test_installed_without_accelerators(installed):
    lines = run(sys.executable, "-m", "pip", "--python", str(installed), "list", "--format", "freeze", cwd="/")
    found = {line.split("==")[0] for line in lines.split()}
    assert {"eqx_attn", "jax", "equinox"} <= {name.replace("-", "_") for name in found}
    assert not [name for name in found if ACCELERATORS.match(name)]


USE = """
import pathlib, sys
import jax, jax.numpy as jnp
import eqx_attn

assert pathlib.Path(eqx_attn.__file__).is_relative_to(sys.prefix), eqx_attn.__file__
cache = pathlib.Path(sys.argv[1])

def error(head_dim, **how):
    query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 40, 2, head_dim))
    out = eqx_attn.attention(query, key, value, mask="causal", **how)
    expected = eqx_attn.attention(query, key, value, mask="causal", implementation="reference")
    return float(jnp.max(jnp.abs(out - expected)))

# A sum of up to 96 products of values up to about 4, in float32.
limit = 4 * 96 * float(jnp.finfo(jnp.float32).eps)
assert error(64) < limit, error(64)
assert not list(cache.rglob("*.py"))
with eqx_attn.interpret():
    assert error(96, implementation="pallas_tpu") < limit
assert [path.name for path in cache.rglob("*.py")] == ["bshd_causal_qk96_v96.py"], list(cache.rglob("*"))
"""


def test_installed_attention_and_a_kernel_rendered_on_demand(installed, tmp_path):
    (tmp_path / "cache").mkdir(mode=0o700)
    environment = dict(EQX_ATTN_CACHE_DIR=str(tmp_path / "cache"))
    run(str(installed), "-c", USE, str(tmp_path / "cache"), cwd=tmp_path, **environment)


def test_installed_code_generator(installed, tmp_path):
    codegen = (str(installed), "-m", "eqx_attn.codegen")
    run(*codegen, "--check", cwd=tmp_path)
    assert "SPEC = " in run(*codegen, "--show", "triton/bshd_causal_qk96_v96", cwd=tmp_path)


@pytest.mark.smoke
def test_import_is_light():
    """What takes long to import, or is not there after a plain install, is imported where it is used."""
    heavy = ["jax.experimental.pallas", "jinja2", "matplotlib", "optax", "rich", "triton"]
    code = f"import eqx_attn, sys; print(*(name for name in {heavy} if name in sys.modules))"
    assert run(sys.executable, "-c", code, cwd="/").split() == []
