"""Two processes that talk over the loopback interface give the same as one."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import context_process
import numpy as np

TESTS = Path(__file__).parent


def test_two_processes(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environment = dict(os.environ, XLA_FLAGS="--xla_force_host_platform_device_count=2", JAX_PLATFORMS="cpu")
    environment["PYTHONPATH"] = str(TESTS.parent)
    path = tmp_path / "gradients.npz"
    command = [sys.executable, str(TESTS / "context_process.py"), address]
    processes = [
        subprocess.Popen([*command, str(number), str(path)], env=environment, stderr=subprocess.PIPE, text=True)
        for number in range(2)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    wanted = context_process.gradients(None, context_process.inputs())
    for found, grad in zip(np.load(path).values(), wanted, strict=True):
        np.testing.assert_allclose(found, grad, atol=1e-5)
