"""The checked-in kernels against what the templates write, and the rules that a generated text keeps."""

import ast
import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import jinja2
import pytest

from codegen import render as renderer
from codegen.explain import explain
from codegen.files import compare, expected, generated_folder, package_root
from codegen.matrix import checked_in, FAMILIES
from codegen.render import body_digest, body_of, digest_of, render, RenderError, semantics_text
from codegen.spec import KernelSpec, Layout, MaskKind, SpecError, Target

SPEC = KernelSpec(Target.TRITON, Layout.BSHD, MaskKind.CAUSAL, 128, 128)
SPECS = [pytest.param(spec, id=spec.name) for spec in checked_in()]
PORTABLE = (Target.PALLAS_TPU, Target.TRITON)
ON_DEMAND = [
    KernelSpec(target, Layout.BSHD, mask, qk_dim, v_dim, segments)
    for target in PORTABLE
    for mask, qk_dim, v_dim, segments in (
        (MaskKind.CAUSAL, 96, 96, False),
        (MaskKind.CAUSAL, 192, 128, True),
        (MaskKind.WINDOW, 8, 256, False),
        (MaskKind.FULL, 72, 40, True),
    )
]


@pytest.mark.smoke
def test_generated_is_what_the_templates_write():
    difference = compare(generated_folder(), expected())
    assert not difference, f"run `python -m codegen`: {difference}"


def test_the_matrix_is_small_and_every_kernel_is_there_for_a_family():
    needed_by = checked_in()
    assert len(needed_by) <= 120
    assert all(needed_by.values())
    assert all(spec.refusal() is None for spec in needed_by)
    assert all(any(spec in family.specs() for family in FAMILIES) for spec in needed_by)


def names_of(target: Target) -> set[str]:
    return {spec.name.partition("/")[2] for spec in checked_in() if spec.target is target}


def test_the_matrix_covers_both_targets_alike():
    tpu, gpu = map(names_of, PORTABLE)
    assert tpu == gpu != set()
    assert set() != names_of(Target.GLUON_HOPPER) < gpu


@pytest.mark.parametrize("mask", MaskKind)
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("segments", [False, True])
def test_every_mask_and_dim_is_checked_in(mask, dim, segments):
    for target in PORTABLE:
        assert KernelSpec(target, Layout.BSHD, mask, dim, dim, segments) in checked_in()


@pytest.mark.parametrize("spec", SPECS)
def test_the_header_names_spec_template_and_digest(spec):
    text = render(spec)
    lines = text.splitlines()
    template = f"templates/{spec.target}/attention.py.jinja"
    assert lines[0] == f"# Generated from {template} by python -m codegen; do not edit."
    assert (package_root() / template).is_file()
    assert lines[1] == f"# spec: {spec.name}"
    assert lines[2] == f"# digest: {digest_of(text)}"
    assert digest_of(text) == body_digest(text)
    assert text == "".join(line + "\n" for line in lines[:3]) + body_of(text)


def test_an_edited_body_has_another_digest():
    text = render(SPEC)
    edited = text.replace("SPEC", "SPEX", 1)
    assert digest_of(edited) == digest_of(text) != body_digest(edited)
    assert digest_of(body_of(text)) is None


@pytest.mark.parametrize("spec", SPECS)
def test_a_kernel_file_keeps_the_contract(spec):
    tree = ast.parse(render(spec))
    assert ast.get_docstring(tree)
    assert constant(tree, "SPEC") == spec.name
    arrays = {"qkv": ["qkv"], "kv": ["q", "kv"]}.get(spec.layout, ["q", "k", "v"])
    assert arguments(tree, "forward") == [*arrays, "operands", "tiles"]
    assert arguments(tree, "backward") == [*arrays, "out", "lse", "dout", "dlse", "operands", "tiles"]
    language = {Target.PALLAS_TPU: "jax.experimental.pallas", Target.TRITON: "triton", Target.GLUON_HOPPER: "triton"}[
        spec.target
    ]
    allowed = ("jax", language, "eqx_attn._device", "functools", "math")
    modules = set(imported(tree))
    assert language in {module[: len(language)] for module in modules}
    assert all(module.startswith(allowed) for module in modules), modules


def constant(tree: ast.Module, name: str) -> str:
    """The value of `name = "..."`."""
    (value,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == name
    )
    return ast.literal_eval(value)


def arguments(tree: ast.Module, name: str) -> list[str]:
    (function,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    return [argument.arg for argument in function.args.args]


def imported(tree: ast.Module):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield f"{node.module}"


@pytest.mark.parametrize("spec", SPECS)
def test_a_kernel_file_reads_as_if_written_by_hand(spec):
    text = render(spec)
    most = 1100 if spec.target is Target.GLUON_HOPPER else 600  # in which each warp's role is written out
    assert text.count("\n") <= (most + 100 if spec.bias else most)  # its gradient is one more kernel
    assert not re.search(r"\n\n\n\n|[ \t]\n|\{[{%#]|[%#}]\}", text)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.If, ast.IfExp, ast.While)):
            assert not isinstance(node.test, ast.Constant), f"line {node.lineno} asks a constant"


@pytest.mark.parametrize("spec", SPECS)
def test_a_kernel_uses_its_arguments(spec):
    # Functions inside others are index maps, which take all of the grid's axes.
    for function in ast.parse(render(spec)).body:
        if isinstance(function, ast.FunctionDef):
            used = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
            unused = [name.arg for name in function.args.args if name.arg not in used and not name.arg.startswith("_")]
            assert not unused, f"{function.name} does not use {unused}"


@pytest.fixture(scope="module")
def rendered(tmp_path_factory) -> Path:
    """A folder with every checked-in kernel and some of those that are rendered on demand."""
    folder = tmp_path_factory.mktemp("rendered")
    for spec in [*checked_in(), *ON_DEMAND]:
        path = folder / f"{spec.name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(render(spec))
    return folder


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(["format", "--diff"], id="format"),
        pytest.param(["check", "--output-format=concise"], id="lint"),
    ],
)
def test_ruff_accepts_kernels_as_they_are_written(rendered, command):
    config = package_root() / "pyproject.toml"
    ruff = [sys.executable, "-m", "ruff", *command, "--no-cache", "--config", str(config), str(rendered)]
    result = subprocess.run(ruff, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]


@pytest.mark.smoke
def test_rendering_does_not_depend_on_the_process():
    code = f"from codegen.render import *; print(render(KernelSpec.from_name({SPEC.name!r})), end='')"
    for seed in "12":
        environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": str(package_root())}
        other = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        )
        assert other.stdout == render(SPEC)


def test_a_head_dim_without_a_kernel_is_not_rendered():
    with pytest.raises(
        SpecError, match="there is no kernel triton/bshd_full_qk100_v64: qk_dim is 100; kernels exist for"
    ):
        render(KernelSpec(Target.TRITON, Layout.BSHD, MaskKind.FULL, 100, 64))


def test_grid_semantics_are_written_as_a_tuple():
    axes = [("batch", "parallel", False), ("kv_block", "arbitrary", True)]
    assert ast.literal_eval(semantics_text(axes)) == ("parallel", "arbitrary")
    assert ast.literal_eval(semantics_text(axes[:1])) == ("parallel",)


def test_an_accumulating_grid_axis_must_not_be_parallel():
    with pytest.raises(RenderError, match='\'kv_block\' accumulates and is "parallel"; make it "arbitrary"'):
        semantics_text([("batch", "parallel", False), ("kv_block", "parallel", True)])
    with pytest.raises(RenderError, match="'batch' is 'paralel'; it must be"):
        semantics_text([("batch", "paralel", False)])


@pytest.fixture
def write_template(monkeypatch):
    """Replaces the TPU template by a text."""

    def write(source: str) -> KernelSpec:
        environment = renderer.environment()
        template = {"pallas_tpu/attention.py.jinja": source}
        replaced = environment.overlay(loader=jinja2.DictLoader(template))
        monkeypatch.setattr(renderer, "environment", lambda: replaced)
        return KernelSpec(Target.PALLAS_TPU, Layout.BSHD, MaskKind.FULL, 64, 64)

    return write


@pytest.mark.parametrize("written", ['("parallel", "arbitrary")', '(\n    "parallel",\n)', "pltpu.PARALLEL"])
def test_grid_semantics_that_nobody_checked_are_refused(write_template, written):
    spec = write_template('{{ grid_semantics([("batch", "arbitrary", true)]) }}\n' + written)
    with pytest.raises(RenderError, match="did not come from grid_semantics"):
        render(spec)


def test_checked_grid_semantics_are_accepted(write_template):
    spec = write_template(
        'dimension_semantics={{ grid_semantics([("a", "parallel", false), ("b", "arbitrary", true)]) }}\n'
    )
    assert body_of(render(spec)) == 'dimension_semantics=("parallel", "arbitrary")\n'


def test_an_undefined_name_in_a_template_is_an_error(write_template):
    spec = write_template("{{ head_dmi }}\n")
    with pytest.raises(jinja2.UndefinedError, match="head_dmi"):
        render(spec)


@pytest.mark.parametrize(
    "spec", [*(KernelSpec(t, Layout.BHSD, MaskKind.WINDOW, 64, 64, True) for t in PORTABLE), ON_DEMAND[0]]
)
def test_every_choice_is_explained(spec):
    choices = {choice.field: choice for choice in explain(spec)}
    assert list(choices) == [field.name for field in dataclasses.fields(KernelSpec)]
    assert all(choice.words for choice in choices.values())
    for field in ("layout", "mask", "segments"):  # A choice that changes no text is not one that a spec should hold.
        assert choices[field].added, field
    assert any(choice.branches for choice in choices.values())
    for choice in choices.values():
        for branch in choice.branches:
            lines = (package_root() / "templates" / branch.template).read_text().splitlines()
            assert 1 <= branch.first <= branch.last <= len(lines)
