"""`python -m codegen`, run in a small working copy of its own."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from codegen.files import package_root
from codegen.matrix import checked_in
from codegen.records import Record
from codegen.spec import Target

TEMPLATE = '''\
{% import "macros/masks.jinja" as masks with context %}
"""{{ mask }} attention."""

SPEC = "{{ spec.name }}"
{{ masks.keep() }}
'''
MASKS = """\
{% macro keep() %}
{% if mask == "causal" %}
KEEP = "below"
DIAGONAL = 0
{%- else %}
KEEP = "all"
{%- endif %}
{% endmacro %}
"""
CAUSAL = "triton/bshd_causal_qk64_v64"
FULL = "triton/bshd_full_qk64_v64"


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A working copy with this code generator and templates of a few lines; nothing is generated yet."""
    shutil.copytree(package_root() / "codegen", tmp_path / "codegen", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "pyproject.toml").touch()
    files = {f"{target}/attention.py.jinja": TEMPLATE for target in Target} | {"macros/masks.jinja": MASKS}
    for name, text in files.items():
        path = tmp_path / "templates" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def run(folder: Path, *arguments: str, module: str = "codegen", status: int = 0) -> str:
    """Runs the command, which must end with this status and without a stack trace, and returns all that it says."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "100"}
    command = [sys.executable, "-m", module, *arguments]
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    said = result.stdout + result.stderr
    assert "Traceback" not in said, said
    assert result.returncode == status, said
    return said


@pytest.mark.smoke
def test_writes_only_what_changed_and_deletes_orphans(checkout):
    count = len(checked_in())
    assert f"{count} of {count} kernels written, 0 deleted" in run(checkout)
    assert f"all {count} kernels are up to date; nothing to write" in run(checkout)

    generated = checkout / "generated"
    drifted, missing = generated / f"{CAUSAL}.py", generated / f"{FULL}.py"
    orphan, untouched = generated / "cuda/old.py", generated / "triton/bhsd_causal_qk64_v64.py"
    text, time = drifted.read_text(), untouched.stat().st_mtime_ns
    drifted.write_text(text + "# edited\n")
    missing.unlink()
    orphan.parent.mkdir()
    orphan.write_text("")

    said = run(checkout, "--check", status=1)
    assert f"missing generated/{FULL}.py" in said
    assert f"drifted generated/{CAUSAL}.py" in said
    assert "orphaned generated/cuda/old.py" in said
    assert said.count("generated/triton") == 2
    assert orphan.exists() and not missing.exists()

    said = run(checkout)
    assert f"wrote generated/{FULL}.py" in said
    assert f"rewrote generated/{CAUSAL}.py" in said
    assert "deleted generated/cuda/old.py" in said
    assert f"2 of {count} kernels written, 1 deleted" in said
    assert drifted.read_text() == text and missing.exists() and not orphan.parent.exists()
    assert untouched.stat().st_mtime_ns == time
    assert f"all {count} kernels are as the templates write them" in run(checkout, "--check")


def test_a_change_of_a_macro_shows_in_the_kernels_that_use_it(checkout):
    run(checkout)
    masks = checkout / "templates/macros/masks.jinja"
    masks.write_text(MASKS.replace('"below"', '"under"'))
    said = run(checkout, "--check", status=1)
    names = [spec.name for spec in checked_in()]
    assert all((f"drifted generated/{name}.py" in said) == ("causal" in name) for name in names)


def test_list_shows_what_is_known_of_the_kernel_as_it_is(checkout):
    run(checkout)
    digest = (checkout / "generated" / f"{CAUSAL}.py").read_text().splitlines()[2].removeprefix("# digest: ")
    entries = {
        CAUSAL: {"digest": digest, "targets": {"sm_80": "triton 3", "sm_90a": "triton 3"}},
        FULL: {"digest": "of an older text", "targets": {"sm_80": "triton 3"}},
    }
    (checkout / "generated/COMPILED.json").write_text(json.dumps(entries))
    devices = {"NVIDIA H200": {"errors": {}}}
    (checkout / "generated/VERIFIED.json").write_text(json.dumps({CAUSAL: {"digest": digest, "devices": devices}}))

    said = run(checkout, "--list", "triton/bshd_*_qk64_v64")
    rows = {line.split()[0]: " ".join(line.split()) for line in said.splitlines()}
    assert list(rows) == ["spec", CAUSAL, FULL, "triton/bshd_window_qk64_v64"]
    assert rows[CAUSAL] == f"{CAUSAL} dense decoders (GPT, Llama, Qwen; Gemma at 256) 8 sm_80 sm_90a NVIDIA H200"
    assert rows[FULL].endswith(" 7 - -")

    assert len(run(checkout, "--list").splitlines()) == 1 + len(checked_in())


def test_a_record_outlives_neither_the_text_nor_the_spec(tmp_path):
    record = Record("RECORD.json", "targets")
    record.add(
        tmp_path, {"b": ("1", {"x": "old"}), "a": ("1", {"x": "old"}), "c": ("1", {"x": "old"})}, {"a", "b", "c"}
    )
    record.add(tmp_path, {"a": ("1", {"y": "new"}), "b": ("2", {"y": "new"})}, {"a", "b"})
    entries = record.read(tmp_path)
    assert list(entries) == ["a", "b"]
    assert record.lookup(entries, "a", "1") == {"x": "old", "y": "new"}
    assert record.lookup(entries, "b", "2") == {"y": "new"}
    assert record.lookup(entries, "b", "1") == record.lookup(entries, "c", "1") == {}


def test_show_prints_the_file(checkout):
    run(checkout)
    text = (checkout / "generated" / f"{CAUSAL}.py").read_text()
    assert run(checkout, "--show", CAUSAL) == text
    assert run(checkout, "--show", f"generated/{CAUSAL}.py") == text
    assert 'SPEC = "triton/bshd_causal_qk96_v96"' in run(checkout, "--show", "triton/bshd_causal_qk96_v96")


def test_diff_shows_what_a_choice_costs_and_nothing_else(checkout):
    said = run(checkout, "--diff", FULL, CAUSAL).splitlines()
    assert said[:2] == [f"--- {FULL}", f"+++ {CAUSAL}"]
    changed = [line for line in said[2:] if line[0] in "+-"]
    assert changed == [
        '-"""full attention."""',
        '+"""causal attention."""',
        f'-SPEC = "{FULL}"',
        '-KEEP = "all"',
        f'+SPEC = "{CAUSAL}"',
        '+KEEP = "below"',
        "+DIAGONAL = 0",
    ]
    assert run(checkout, "--diff", FULL, FULL) == ""


def test_explain_names_the_branches_of_the_templates(checkout):
    said = run(checkout, "--explain", CAUSAL)
    assert "needed by  dense decoders" in said
    assert "mask = causal" in said
    assert "against triton/bshd_full_qk64_v64: +4 -3 lines\n    templates/macros/masks.jinja:3-4 (in keep)\n" in said
    assert "templates/macros/masks.jinja:6 (in keep)" in run(checkout, "--explain", FULL)
    assert "not checked in, rendered on demand" in run(checkout, "--explain", "triton/bshd_causal_qk96_v96")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--show", "triton/bshd_casual_qk64_v64"], "'casual' where one of full, causal, window belongs"),
        (["--show", "triton/bshd_casual_qk64_v64"], f"Nearest: {CAUSAL}"),
        (["--diff", CAUSAL, "triton/bshd_ful_qk64_v64"], f"Nearest: {FULL}"),
        (
            ["--explain", "triton/bshd_causal_qk100_v64"],
            "qk_dim is 100; kernels exist for multiples of 8 from 8 to 256",
        ),
        (["--list", "tritn/*"], "no checked-in kernel matches 'tritn/*'"),
        (["--list", "zzz"], "`python -m codegen --list` shows all names"),
        (["--list", ""], "no checked-in kernel matches ''"),
        (["--verify"], "--verify needs --platform tpu or --platform cuda"),
        (["--platform", "tpu"], "--platform belongs to --verify"),
        (["--list", "--record"], "--record belongs to --verify"),
        (
            ["--verify", "triton/*", "--platform", "tpu"],
            "--platform tpu compiles pallas_tpu kernels; the pattern matches none",
        ),
        (
            ["--verify", "--platform", "tpu", "--device", "v9"],
            "--device v9 is unknown; --platform tpu has v4, v5e, v5p, v6e, 7x",
        ),
        (["--verify", "--platform", "gpu"], "choose from"),
        (["--check", "--list"], "not allowed with argument"),
    ],
)
def test_a_mistake_gets_a_message(checkout, arguments, message):
    assert message in run(checkout, *arguments, status=2)


@pytest.mark.parametrize("platform, package", [("tpu", "libtpu"), ("cuda", "triton")])
def test_a_missing_compiler_names_the_extra(checkout, platform, package):
    (checkout / "without.py").write_text(
        "import importlib.util, runpy\n"
        "find = importlib.util.find_spec\n"
        f"importlib.util.find_spec = lambda name, *rest: None if name == {package!r} else find(name, *rest)\n"
        "runpy.run_module('codegen', run_name='__main__')\n"
    )
    said = run(checkout, "--verify", "--platform", platform, module="without", status=2)
    assert f"needs {package}: pip install 'eqx_attn[{platform}]'" in said


def test_only_kernels_that_are_up_to_date_are_verified(checkout):
    pytest.importorskip("libtpu")
    said = run(checkout, "--verify", "*/bshd_causal_qk64_v64", "--platform", "tpu", status=2)
    assert (
        "generated/pallas_tpu/bshd_causal_qk64_v64.py is missing or not up to date: run `python -m codegen` first"
        in said
    )


def test_a_mistake_in_a_template_names_its_line(checkout):
    masks = checkout / "templates/macros/masks.jinja"
    masks.write_text(MASKS.replace('"below"', "{{ head_dmi }}"))
    said = run(checkout, "--check", status=2)
    assert "templates/macros/masks.jinja:3: 'head_dmi' is undefined" in said
    masks.write_text(MASKS.replace("{%- else %}", "{%- els %}"))
    assert "templates/macros/masks.jinja:5: Encountered unknown tag 'els'" in run(checkout, "--check", status=2)


def test_help_suffices(checkout):
    said = run(checkout, "--help")
    for option in (
        "--check",
        "--list",
        "--show",
        "--explain",
        "--diff",
        "--verify",
        "--platform",
        "--record",
        "examples",
    ):
        assert option in said


@pytest.fixture
def installed(checkout) -> Path:
    """The folders inside `eqx_attn`, as the wheel lays them out."""
    run(checkout)
    (checkout / "pyproject.toml").unlink()
    (checkout / "eqx_attn").mkdir()
    (checkout / "eqx_attn/__init__.py").touch()
    for folder in ("codegen", "templates", "generated"):
        (checkout / folder).rename(checkout / "eqx_attn" / folder)
    return checkout


def test_an_installed_package_answers_but_is_not_rewritten(installed):
    module = "eqx_attn.codegen"
    assert CAUSAL in run(installed, "--list", module=module)
    assert "mask = causal" in run(installed, "--explain", CAUSAL, module=module)
    assert '+KEEP = "below"' in run(installed, "--diff", FULL, CAUSAL, module=module)
    text = (installed / "eqx_attn/generated" / f"{CAUSAL}.py").read_text()
    assert run(installed, "--show", CAUSAL, module=module) == text
    assert "all" in run(installed, "--check", module=module)
    assert "installed package, whose kernels are not rewritten" in run(installed, module=module, status=2)
