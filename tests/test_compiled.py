"""Kernels through the real compilers: those that have changed since `make verify` did all of them, and some more."""

import datetime
import importlib.util

import pytest

from codegen.files import generated_folder
from codegen.matrix import checked_in
from codegen.records import COMPILED
from codegen.spec import KernelSpec
from codegen.verify import compile_spec, devices_of, Platform, PLATFORMS, unrecorded_devices

MOST = 2


def chosen(platform: Platform, day: int) -> list[tuple[KernelSpec, str]]:
    """A device for one of twenty specs, and for at most `MOST` others that are not recorded as compiled for all of them.

    All at once would take longer than the suite may: a TPU kernel takes up to a minute. They and the device change from day
    to day, so that twenty runs on twenty days compile every spec.
    """
    entries = COMPILED.read(generated_folder())
    specs = [spec for spec in checked_in() if spec.target in platform.targets]
    today = [spec for number, spec in enumerate(specs) if (number + day) % 20 == 0]
    turned = specs[day % len(specs) :] + specs[: day % len(specs)]
    missing = {spec: unrecorded_devices(spec, platform, entries) for spec in turned if spec not in today}
    devices = {spec: devices_of(spec, platform) for spec in today}
    jobs = [(spec, devices[spec][(specs.index(spec) + day) % len(devices[spec])]) for spec in today]
    others = [(spec, devices[day % len(devices)]) for spec, devices in missing.items() if devices]
    return jobs + others[:MOST]


TODAY = datetime.date.today().toordinal()
JOBS = [
    pytest.param(platform, spec, device, id=f"{spec.name}-{device}")
    for platform in PLATFORMS.values()
    for spec, device in chosen(platform, TODAY)
]


@pytest.mark.parametrize("platform, spec, device", JOBS)
def test_compiles_without_a_spill(platform, spec, device):
    for package in platform.packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    compiled = compile_spec(spec, device)
    assert compiled.kernels or compiled.error
    assert not compiled.faults


def test_every_spec_has_its_day():
    for platform in PLATFORMS.values():
        specs = {spec for day in range(20) for spec, _ in chosen(platform, day)}
        assert specs == {spec for spec in checked_in() if spec.target in platform.targets}
