"""Kernels that are not checked in: rendered on demand into the user's cache, which is not trusted blindly."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import jax
import oracle
import pytest

import eqx_attn
from codegen.spec import KernelSpec
from eqx_attn import _kernels
from eqx_attn._codegen import REPOSITORY
from eqx_attn._kernels import cache_directory, is_checked_in, KernelCacheError, load_kernel
from eqx_attn._tuning import default_tiles

HEAD_DIM_96 = KernelSpec.from_name("triton/bshd_causal_qk96_v96")
LATENT = KernelSpec.from_name("triton/bshd_causal_qk128_v64")


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty cache, and a process that has loaded nothing yet."""
    monkeypatch.setenv("EQX_ATTN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("EQX_ATTN_NO_CODEGEN", raising=False)
    load_kernel.cache_clear()
    yield tmp_path / "cache"
    load_kernel.cache_clear()


def path_of(cache, spec):
    return cache / "kernels" / f"{spec.name}.py"


@pytest.mark.smoke
@pytest.mark.parametrize(
    "spec", [HEAD_DIM_96, LATENT, KernelSpec.from_name("pallas_tpu/bshd_causal_qk96_v96")], ids=lambda s: s.name
)
def test_rendered_on_demand_and_right(spec, cache, random_key):
    if spec.target == "triton":
        pytest.importorskip("triton")
    assert not is_checked_in(spec)
    inputs = oracle.random_inputs(random_key, 33, 40, heads=(2, 1), dims=(spec.qk_dim, spec.v_dim), batch=(1,))
    with eqx_attn.interpret(), jax.default_matmul_precision("highest"):
        oracle.check(inputs, eqx_attn.Causal(), implementation=str(spec.target))
    assert path_of(cache, spec).is_file()
    assert spec.name == load_kernel(spec).SPEC


def test_a_checked_in_kernel_needs_no_cache(cache, monkeypatch):
    monkeypatch.setattr(_kernels, "render", None)
    spec = KernelSpec.from_name("triton/bshd_causal_qk64_v64")
    assert is_checked_in(spec) and spec.name == load_kernel(spec).SPEC
    assert not cache.exists()


def test_loaded_once(cache):
    assert load_kernel(HEAD_DIM_96) is load_kernel(HEAD_DIM_96)


def test_what_lies_in_the_cache_is_not_rewritten(cache):
    load_kernel(HEAD_DIM_96)
    before = path_of(cache, HEAD_DIM_96).stat()
    load_kernel.cache_clear()
    load_kernel(HEAD_DIM_96)
    after = path_of(cache, HEAD_DIM_96).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_an_older_text_is_replaced(cache):
    path = path_of(cache, HEAD_DIM_96)
    path.parent.mkdir(parents=True)
    path.write_text("raise SystemExit('of an older version')\n")
    assert HEAD_DIM_96.name == load_kernel(HEAD_DIM_96).SPEC


def test_no_codegen_names_the_spec(cache, monkeypatch):
    monkeypatch.setenv("EQX_ATTN_NO_CODEGEN", "1")
    with pytest.raises(
        KernelCacheError, match="triton/bshd_causal_qk96_v96 is not checked in and EQX_ATTN_NO_CODEGEN is set"
    ):
        load_kernel(HEAD_DIM_96)
    assert not cache.exists()
    monkeypatch.setenv("EQX_ATTN_NO_CODEGEN", "0")
    load_kernel(HEAD_DIM_96)


def test_no_codegen_reaches_the_caller_of_attention(cache, monkeypatch, random_key):
    monkeypatch.setenv("EQX_ATTN_NO_CODEGEN", "1")
    pytest.importorskip("triton")
    arrays = oracle.random_inputs(random_key, 5, 5, dims=(48, 48)).arrays
    with (
        pytest.raises(KernelCacheError, match="triton/bshd_full_qk48_v48 .*add this spec to codegen/matrix.py"),
        eqx_attn.interpret(),
    ):
        eqx_attn.attention(*arrays, implementation="triton")


def test_a_cache_that_cannot_be_written(cache, monkeypatch):
    """A path below a regular file: nobody can write there, not even root."""
    cache.parent.joinpath("file").touch()
    monkeypatch.setenv("EQX_ATTN_CACHE_DIR", str(cache.parent / "file" / "cache"))
    message = (
        "triton/bshd_causal_qk96_v96 is not checked in and cannot be written to .*set EQX_ATTN_CACHE_DIR to a folder"
    )
    with pytest.raises(KernelCacheError, match=message):
        load_kernel(HEAD_DIM_96)


def test_folders_are_private(cache):
    previous = os.umask(0)
    try:
        load_kernel(HEAD_DIM_96)
    finally:
        os.umask(previous)
    path = path_of(cache, HEAD_DIM_96)
    for folder in (path.parent, path.parent.parent, cache):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700, folder
    assert not path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def test_a_file_that_others_can_write_is_refused(cache):
    load_kernel(HEAD_DIM_96)
    path_of(cache, HEAD_DIM_96).chmod(0o666)
    load_kernel.cache_clear()
    with pytest.raises(KernelCacheError, match="owned or writable by somebody else.*set EQX_ATTN_CACHE_DIR"):
        load_kernel(HEAD_DIM_96)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_owner_is_refused(cache):
    load_kernel(HEAD_DIM_96)
    os.chown(path_of(cache, HEAD_DIM_96), 12345, -1)
    load_kernel.cache_clear()
    with pytest.raises(KernelCacheError, match="owned or writable by somebody else"):
        load_kernel(HEAD_DIM_96)


def test_a_tampered_file_is_not_executed(cache):
    load_kernel(HEAD_DIM_96)
    path = path_of(cache, HEAD_DIM_96)
    path.write_text(path.read_text() + "\nraise SystemExit('tampered')\n")
    load_kernel.cache_clear()
    assert HEAD_DIM_96.name == load_kernel(HEAD_DIM_96).SPEC  # rendered again
    assert "tampered" not in path.read_text()


def test_a_file_changed_between_writing_and_reading_is_refused(cache, monkeypatch):
    replace = _kernels._replace

    def replace_and_tamper(path: Path, text: str):
        replace(path, text + "\nraise SystemExit('tampered')\n")

    monkeypatch.setattr(_kernels, "_replace", replace_and_tamper)
    with pytest.raises(KernelCacheError, match="is not what was rendered .*delete it and try again"):
        load_kernel(HEAD_DIM_96)


def test_cache_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("EQX_ATTN_CACHE_DIR", str(tmp_path))
    assert cache_directory() == tmp_path
    monkeypatch.delenv("EQX_ATTN_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory().parent == tmp_path / "eqx_attn"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory().parent == tmp_path / ".cache" / "eqx_attn"


RENDER = """
import sys
from eqx_attn._codegen import KernelSpec
from eqx_attn._kernels import load_kernel
print("ready", flush=True)
sys.stdin.readline()
for dim in range(8, 64, 8):
    load_kernel(KernelSpec.from_name(f"pallas_tpu/bshd_causal_qk{dim}_v{dim}"))
print("done", flush=True)
"""


def test_two_processes_render_the_same_specs_at_once(cache):
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RENDER], cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        assert process.communicate(timeout=120)[0] == "done\n" and process.returncode == 0
    names = sorted(path.name for path in (cache / "kernels" / "pallas_tpu").iterdir() if path.is_file())
    assert names == sorted(f"bshd_causal_qk{dim}_v{dim}.py" for dim in range(8, 64, 8))  # and no temporary file is left


def test_tiles_exist_for_what_is_rendered_on_demand():
    for spec in (HEAD_DIM_96, LATENT):
        for dtype in ("float16", "float32"):
            assert default_tiles(spec, dtype, 1024, 1024).forward.block_q >= 16
