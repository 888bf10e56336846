"""The search for a Python to create .venv with, on machines that this one is not."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FIND_PYTHON = Path(__file__).parents[1] / ".ci" / "find_python"

# A pyenv shim of a version that is not active.
SHIM = "#!/bin/sh\necho 'pyenv: command not found' >&2\nexit 127\n"


def python(version, lacks=()):
    """An interpreter that says it is `version` and has no modules `lacks`: this one, in disguise."""
    disguise = f"import sys; sys.version_info = {version}; sys.modules.update(dict.fromkeys({list(lacks)}))"
    return f'#!/bin/sh\nexec "{sys.executable}" -c "{disguise}; exec(sys.argv[1])" "$2"\n'


@pytest.fixture
def machine(tmp_path):
    """Returns a function that runs the search where `programs` (path below the home: text) is all there is."""

    def find(programs, **environment):
        (tmp_path / "bin").mkdir()
        for tool in ("sh", "ls", "sed", "sort"):
            (tmp_path / "bin" / tool).symlink_to(shutil.which(tool))
        for name, text in programs.items():
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
            file.chmod(0o755)
        environment = dict(HOME=str(tmp_path), PATH=str(tmp_path / "bin")) | environment
        result = subprocess.run([FIND_PYTHON], env=environment, capture_output=True, text=True, check=False)
        found = result.stdout.strip().removeprefix(f"{tmp_path}{os.sep}")
        return result.returncode, found, result.stderr

    return find


def test_default_python_too_old_and_pyenv_shims_that_fail(machine):
    programs = {
        "bin/python3": python((3, 11, 7)),
        "bin/python3.12": SHIM,
        "bin/python3.13": SHIM,
        ".pyenv/versions/3.11.7/bin/python3": python((3, 11, 7)),
        ".pyenv/versions/3.12.9/bin/python3": python((3, 12, 9)),
        ".pyenv/versions/3.12.10/bin/python3": python((3, 12, 10)),
    }
    assert machine(programs) == (0, ".pyenv/versions/3.12.10/bin/python3", "")


def test_newest_minor_version_and_not_a_variant(machine):
    programs = {
        ".pyenv/versions/3.12.10/bin/python3": python((3, 12, 10)),
        ".pyenv/versions/3.13.1/bin/python3": python((3, 13, 1)),
        ".pyenv/versions/3.13.2t/bin/python3": python((3, 13, 2)),
    }
    assert machine(programs)[:2] == (0, ".pyenv/versions/3.13.1/bin/python3")


def test_pyenv_root_elsewhere(machine, tmp_path):
    programs = {"opt/pyenv/versions/3.13.0/bin/python3": python((3, 13, 0))}
    found = machine(programs, PYENV_ROOT=str(tmp_path / "opt/pyenv"))
    assert found[:2] == (0, "opt/pyenv/versions/3.13.0/bin/python3")


def test_path_before_pyenv(machine):
    programs = {
        "bin/python3.12": python((3, 12, 3)),
        ".pyenv/versions/3.13.0/bin/python3": python((3, 13, 0)),
    }
    assert machine(programs)[:2] == (0, "bin/python3.12")


def test_python3_when_it_is_new_enough(machine):
    assert machine({"bin/python3": python((3, 12, 3))})[:2] == (0, "bin/python3")


def test_without_venv_it_does_not_count(machine):
    programs = {
        "bin/python3.12": python((3, 12, 3), lacks=["ensurepip"]),
        ".pyenv/versions/3.12.1/bin/python3": python((3, 12, 1)),
    }
    assert machine(programs)[:2] == (0, ".pyenv/versions/3.12.1/bin/python3")


@pytest.mark.parametrize("programs", [{}, {"bin/python3": python((3, 11, 7)), "bin/python3.12": SHIM}])
def test_nothing_fits(machine, programs):
    status, found, message = machine(programs)
    assert (status, found) == (1, "")
    assert message.startswith("eqx_attn needs Python 3.12 or 3.13 with venv: install it")
    assert message.count("\n") == 1


def test_python_variable_wins(machine, tmp_path):
    programs = {"bin/python3.13": python((3, 13, 0)), "mine/python": python((3, 12, 0))}
    assert machine(programs, PYTHON=str(tmp_path / "mine/python"))[:2] == (0, "mine/python")


def test_python_variable_that_does_not_fit_is_an_error(machine, tmp_path):
    programs = {"bin/python3.13": python((3, 13, 0)), "mine/python": python((3, 11, 0))}
    status, found, message = machine(programs, PYTHON=str(tmp_path / "mine/python"))
    assert (status, found) == (1, "")
    assert f"PYTHON={tmp_path}/mine/python is no working Python 3.12 or newer" in message
