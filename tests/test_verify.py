"""What `--verify` makes of the compilers' answers."""

import pytest

from codegen import verify
from codegen.compilers import short_name
from codegen.matrix import matching
from codegen.records import COMPILED
from codegen.render import body_digest, render
from codegen.spec import KernelSpec
from codegen.verify import CannotVerify, Compiled, PLATFORMS, verify_specs
from eqx_attn.bench._static import vmem_of_kernels

SPECS = [KernelSpec.from_name(f"triton/bshd_full_qk64_v64{option}") for option in ("", "_segments")]
HLO = """\
HloModule jit_forward
  %fusion.1 = bf16[8,128]{1,0} fusion(%p.1), kind=kLoop
  %attention_forward.3 = (bf16[8,128]{1,0}) custom-call(%p.1), custom_call_target="tpu_custom_call", backend_config=\
{"custom_call_config":{"body":"..."},"used_scoped_memory_configs":[{"memory_space":"1","offset":"0","size":"2097152"}]}
"""
GOOD = Compiled({"forward": {"registers": 200, "shared": 98304, "spill": 0, "tensor_core": "mma m16n8k16"}})
SPILLING = Compiled({"forward": {"registers": 255, "shared": 98304, "spill": 40, "tensor_core": "mma m16n8k16"}})
IDLE = Compiled({"forward": {"registers": 255, "shared": 98304, "spill": 0, "tensor_core": ""}})
FAILED = Compiled(error="ValueError: needs 300 KiB of shared memory")


def test_vmem_is_read_from_the_compiled_program():
    assert dict(vmem_of_kernels(HLO)) == {"attention_forward.3": 2097152}


def test_an_instruction_is_named_by_kind_and_shape():
    assert short_name("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16") == "wgmma m64n128k16"
    assert short_name("tcgen05.mma.cta_group::1.kind::f16") == "tcgen05"


@pytest.fixture
def verifying(monkeypatch, tmp_path, capsys):
    """Runs `verify_specs` on two specs and sm_80, sm_90a, with given results in the order of the jobs."""

    def run(*results: Compiled) -> tuple[int, list[str]]:
        monkeypatch.setattr(verify, "generated_folder", lambda: tmp_path)
        monkeypatch.setattr(verify, "check_written", lambda specs: None)
        jobs = [(spec, device) for spec in SPECS for device in ("sm_80", "sm_90a")]
        monkeypatch.setattr(verify, "_compile_all", lambda *_: dict(zip(jobs, results, strict=True)))
        monkeypatch.setattr(verify, "check_installed", lambda platform: None)
        status = verify_specs(SPECS, "cuda", ("sm_80", "sm_90a"), record=True)
        return status, [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]

    return run


def test_what_compiled_is_shown_and_recorded(verifying, tmp_path):
    status, said = verifying(GOOD, GOOD, GOOD, GOOD)
    assert status == 0
    assert said[0] == "spec kernel device registers shared memory spill tensor cores"
    assert said[1] == "triton/bshd_full_qk64_v64 forward sm_80 200 96 KiB 0 mma m16n8k16"
    assert said[-1] == "4 of 4 compilations are as they should be"
    entries = COMPILED.read(tmp_path)
    for spec in SPECS:
        assert list(COMPILED.lookup(entries, spec.name, body_digest(render(spec)))) == ["sm_80", "sm_90a"]


@pytest.mark.parametrize(
    "bad, message",
    [
        (SPILLING, "forward spills 40 bytes"),
        (IDLE, "forward has no tensor-core instruction"),
        (FAILED, "ValueError: needs 300 KiB of shared memory"),
    ],
)
def test_a_fault_fails_and_is_not_recorded(verifying, tmp_path, bad, message):
    status, said = verifying(bad, bad, GOOD, bad)
    assert status == 1
    assert f"triton/bshd_full_qk64_v64 for sm_80, sm_90a: {message}" in said
    assert f"triton/bshd_full_qk64_v64_segments for sm_90a: {message}" in said
    assert said[-1] == "1 of 4 compilations are as they should be"
    entries = COMPILED.read(tmp_path)
    assert {name: list(entry["targets"]) for name, entry in entries.items()} == {
        "triton/bshd_full_qk64_v64_segments": ["sm_80"]
    }


def test_a_kernel_without_a_compiler_is_refused():
    with pytest.raises(CannotVerify, match="--platform tpu compiles pallas_tpu kernels; the pattern matches none"):
        verify_specs(matching("triton/*"), "tpu", (), record=False)
    assert {target for platform in PLATFORMS.values() for target in platform.targets} == {
        spec.target for spec in matching("*")
    }
