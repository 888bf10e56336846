"""The predicted speed of sequences over devices, against what was measured on two."""

import itertools
import json
from pathlib import Path

import pytest

from eqx_attn.bench import __main__ as command
from eqx_attn.bench._cost_model import Machine, predict, Work

MEASURED = json.loads((Path(__file__).parents[1] / "benchmarks/results/h200x2_context.json").read_text())
BEFORE_KEYS_IN_ORDER = "f32211ab108f0d9e2ca4e3e5baec49662f06813c"
"""Then gathered keys lay in the order of devices, so that kernels visited blocks that they do not see."""
LINK, LATENCY, MEMORY = 370.0, 150e-6, 4000.0


def measured_rows():
    for row in MEASURED["rows"]:
        in_device_order = (row["strategy"], row["order"]) == ("all_gather", "dual_chunk")
        if not (in_device_order and MEASURED["commit"] == BEFORE_KEYS_IN_ORDER):
            yield row


def identify(row):
    return "-".join(str(row[name]) for name in ("tokens", "strategy", "order", "direction")).replace(" ", "_")


@pytest.mark.parametrize("row", list(measured_rows()), ids=identify)
def test_predicts_two_devices(row):
    """Within 15 %, from one device's speed in the same run and the links alone."""
    rates = {
        of["direction"]: of["one_device_tflops"]
        for of in MEASURED["rows"]
        if all(of[name] == row[name] for name in ("tokens", "strategy", "order"))
    }
    forward = rates["forward"]
    backward = 2.5 / (3.5 / rates["forward and backward"] - 1 / forward)
    work = Work(row["tokens"], row["heads"], row["heads"], row["head_dim"])
    found = predict(work, Machine(forward, backward, LINK, LATENCY, MEMORY), 2, row["strategy"], row["order"])
    seconds = found.forward if row["direction"] == "forward" else found.both
    assert 1e3 * seconds == pytest.approx(row["milliseconds"], rel=0.15)


FREE = Machine(400.0, 300.0, link=1e12, latency=0.0, memory=1e12)


@pytest.mark.parametrize("devices", [1, 8, 64])
def test_communication_that_costs_nothing(devices):
    """All of the speed is left, and in contiguous order what the idle devices leave: n of 2n - 1 parts."""
    work = Work(1 << 20, 64, 8, 128)
    for strategy, order in itertools.product(
        ("ring", "all_gather", "all_to_all"), ("contiguous", "dual_chunk", "striped")
    ):
        found = predict(work, FREE, devices, strategy, order)
        balanced = order != "contiguous" or strategy == "all_to_all"
        wanted = 1.0 if balanced else devices / (2 * devices - 1)
        assert found.efficiency == pytest.approx(wanted, rel=1e-5) == found.forward_efficiency


def test_messages_that_take_all_of_the_time():
    """By hand: four devices, one token each, one head of one channel, a second for a number, kernels that cost nothing."""
    slow = Machine(1e12, 1e12, link=1e-9, latency=0.0, memory=1e12)
    work = Work(4, 1, 1, 1, itemsize=1)
    ring = predict(work, slow, 4, "ring", "dual_chunk")
    assert ring.forward == pytest.approx(3 * 2)
    assert ring.both - ring.forward == pytest.approx(3 * 2 + 4 * 2 * 4)
    gather = predict(work, slow, 4, "all_gather", "dual_chunk")
    assert gather.forward == pytest.approx(2 * 3) and gather.both - gather.forward == pytest.approx(2 * 3 + 2 * 3 * 4)


def test_heads_that_do_not_divide():
    with pytest.raises(ValueError, match="gives 8 devices equally many heads, and there are 12"):
        predict(Work(1024, 12, 12, 64), FREE, 8, "all_to_all", "contiguous")


def test_command(tmp_path, capsys):
    path = tmp_path / "new" / "efficiency.png"
    assert command.main(["--predict", "--link-bandwidth", "370,50", "--plot", str(path)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("links of 370 GB/s") == shown.count("links of 50 GB/s") == 1
    lines = [line.split() for line in shown.splitlines() if line.startswith("ring")]
    assert [line[2] for line in lines[:7]] == ["8", "16", "32", "64", "128", "256", "512"]
    assert lines[0][1:3] == ["dual_chunk", "8"] and lines[0][-1] == "99%"
    assert path.read_bytes().startswith(b"\x89PNG")
    assert command.main(["--predict", "--q-heads", "6", "--kv-heads", "4"]) == 2
    assert "--q-heads 6 is no multiple of --kv-heads 4" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.main(["--predict", "--link-bandwidth", "0"])
    assert "0 is not above 0" in capsys.readouterr().err
