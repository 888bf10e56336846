"""The static measure: reading what libtpu dumps, and what its command refuses. Compiling takes seconds, so few kernels do."""

import pytest

from eqx_attn import _tuning_tpu
from eqx_attn._codegen import KernelSpec
from eqx_attn.bench import __main__ as command, _bundles, _static_rows, _static_spec, _static_tune, _steps
from eqx_attn.bench._static import Block, Kernel, Measured
from eqx_attn.bench._static_pool import Job, measure_all
from eqx_attn.bench._tpu import GENERATIONS

# Of a kernel with a grid of four steps, which libtpu 0.0.48 compiled for v6e; shortened.
BUNDLES = """\
= control target key start
LB: loop body
= control target key end

     0   :  { %6 = vsyncpa [#allocation4], 0  ;;  %s664_s6 = smov 0 /* copy for cssa
 of a comment on two lines */ }
   0x1 LB: > { %s685_s10 = sadd.s32 4294967295, %s649_s9 /* iteration index, stage = 1 */ }
   0x2   : > { %94 = sbr.rel (%p91_p9) target bundleno = 12 (0xc), region = 24  ;;  %s421_s20 = sshll.u32 %s107_s18, 7 }
   0x3   : > { %v547_v0 = vld [vmem:[%s722_s26] sm:$0xff] }
   0x4   :  {}
   0x5   :  {}
   0x6   :  {}
   0x7   : > { %459 = vmatpush3.bf16.msra.mxu0 %v547_v0  ;;  %498 = vmatpush3.bf16.msra.mxu1 %v547_v0 }
   0x8   : > { %474 = vmatprep.mubr.bf16.mxu0 %v547_v0 }
   0x9   : > { %475 = vmatmul.mubr.bf16.vlgmr.msra.gmra.mxu0 %v548_v1  ;;  %483 = vmatmul.mubr.bf16.vlgmr.msra.gmra.mxu1 %v552_v5 }
   0xa   : > { %v300 = vpow2.f32 %v299  ;;  %479 = vmatmul.mubr.bf16.gmra.mxu0 %v550_v4 }
   0xb   : > { %vst [vmem:[%s724_s30] sm:$0xff] %v300 }
   0xc   : > { %14 = sbr.rel (!%p17_p1) target bundleno = 1 (0x1), region = 63 }
   0xd   :  {}
   0xe   :  {}
   0xf   :  {}
  0x10   :  {}
  0x11   :  { %349 = vsyncpa [#allocation4], 1 }
""".splitlines()
SLOTS = (
    """\
== CAPACTIY:
MXU, XLU, VALU, VPOP, EUP, VLOAD, VLOAD:FILL, VSTORE, VSTORE:SPILL, SALU
    2     2     4     2     1     3     3     2     2     2
== UTILIZATION:
""".splitlines()
    + [
        f"{matrix} 0 0 0 {exponentials} {loads} 0 {stores} 0 1"
        for matrix, exponentials, loads, stores in [(0, 0, 0, 0)] * 3
        + [(0, 0, 1, 0)]
        + [(0, 0, 0, 0)] * 3
        + [(2, 0, 0, 0), (1, 0, 0, 0), (2, 0, 0, 0), (1, 1, 0, 0), (0, 0, 0, 1)]
        + [(0, 0, 0, 0)] * 6
    ]
)
REGIONS = """\
$region0: #{tiny.1}
  // region range: [0, 18)
  loop: start=0, step=1, limit=6
  $region58: #{tiny.1} parent=1 // loop_pre_header
    // region range: [0, 1)
  $region63: #{tiny.1} parent=1 // loop_body
    // region range: [1, 17)
""".splitlines()


def test_bundles_become_a_tree_of_loops_and_conditions():
    schedule = _bundles.parse_schedule(BUNDLES, SLOTS, REGIONS)
    regions = [(region.kind, region.start, region.end, region.trips) for region in schedule.root.regions()]
    assert regions == [("kernel", 0, 18, 1), ("loop", 1, 17, 6), ("if", 7, 12, 1)]
    conditional = list(schedule.root.regions())[-1]
    assert conditional.own.cycles == 5
    assert conditional.own.matmuls == {("bf16", "0"): 2, ("bf16", "1"): 1}
    assert conditional.own.pushes == {("bf16", "0"): 1, ("bf16", "1"): 1}
    assert schedule.capacity["VALU"] == 4


def test_steps_follow_from_the_tree():
    steps = _steps.steps_of(_bundles.parse_schedule(BUNDLES, SLOTS, REGIONS), GENERATIONS["v6e"])
    assert steps is not None
    assert (steps.steps, steps.idle, steps.whole.cycles) == (4, 11, 16)  # The grid's loop is two trips longer.
    # Three products of 8 cycles on two units in 16 cycles.
    assert steps.whole.units["matrix"] == 3 * 8 / 2 / 16
    assert steps.whole.array == 3 * 2 * 16 * 256**2 / (16 * GENERATIONS["v6e"].flops_per_cycle)


def test_matrix_instructions_of_7x_name_the_row_of_their_result():
    bundles = [line.replace(".gmra.mxu", ".gmra.mrb[4].mxu") for line in BUNDLES]
    assert bundles != BUNDLES
    found, expected = (_bundles.parse_schedule(lines, SLOTS, REGIONS) for lines in (bundles, BUNDLES))
    assert [r.own for r in found.root.regions()] == [r.own for r in expected.root.regions()]


def test_an_unknown_matrix_instruction_is_an_error_and_not_nothing():
    bundles = [line.replace(".gmra.mxu", ".gmra.<new>.mxu") for line in BUNDLES]
    with pytest.raises(ValueError, match="matrix instruction of unknown form.*<new>"):
        _bundles.parse_schedule(bundles, SLOTS, REGIONS)


def test_slots_of_another_number_of_bundles_are_an_error():
    with pytest.raises(ValueError, match="dumped 18 bundles but the use of slots of 17"):
        _bundles.parse_schedule(BUNDLES, SLOTS[:-1], REGIONS)


def test_a_program_without_products_has_no_share():
    with pytest.raises(ValueError, match="no kernel of the program multiplies matrices .there is none"):
        _static_spec.share_of(Measured((), 0.0), "v6e", 512)


def test_the_best_tile_of_a_kernel_counts():
    """A larger share for fewer cycles; what failed only where nothing else was measured."""
    entries = [entry for entry in _static_rows.matrix_entries(["v6e"], 4096) if entry.implementation == "jax_splash"]
    small, large = (entry for entry in entries if entry.label == "jax_splash full 64" and entry.direction == "fwd")
    assert _static_rows.best_entries(entries, {small.job: "out of memory"}) == [small]
    assert _static_rows.best_entries(entries, {small.job: _measured(2000), large.job: "out of memory"}) == [small]
    assert _static_rows.best_entries(entries, {small.job: _measured(2000), large.job: _measured(1000)}) == [large]


def _measured(cycles, tile=None):
    size = (tile.block_q, tile.block_kv) if tile else (1024, 1024)
    step = _steps.Step(cycles, {"matrix": 1.0}, 1.0, 1.0, 0, 0)
    steps = _steps.Steps(step, (), 0, 0, 0, (), 0, 4)
    return Measured((Kernel("attention", 0, 0, (4,), steps, Block(*size, 1)),), 0.0)


@pytest.mark.parametrize("device, cores, most", [("7x", 1, 2 / 3), ("v5p", 2, 1)])
def test_a_kernel_is_compiled_and_measured(device, cores, most):
    """In a process of its own; the second time from the cache.

    The parallel axes reach both cores of a v5p, and each core of a 7x is a device. There a head of 128 fills half of a unit in
    one product of two.
    """
    overrides = (("forward", (("block_q", 512), ("block_kv", 512))),)
    job = Job(_static_spec.spec_program, ("pallas_tpu/bshd_full_qk128_v128", "fwd", device, 1024, overrides), device)
    ((_, measured),) = measure_all([job], processes=1)
    assert not isinstance(measured, str), measured
    (kernel,) = measured.kernels
    assert (kernel.name, kernel.block, kernel.cores) == ("attention_forward", Block(512, 512, 1), cores)
    assert kernel.grid == (1, _static_spec.HEADS, 2, 2) and kernel.vmem > 0
    useful = _static_spec.useful_of(kernel, device, 128, 128)
    assert 0 < useful < most and useful <= kernel.steps.whole.array < 1
    assert list(measure_all([job], processes=1)) == [(job, measured)]


REFUSED = {
    "--static v9": "--static v9: no TPU generation of that name; known are v4, v5e, v5p, v6e, 7x",
    "--static v6e --tile forward=512x512": "--tile and --direction belong to --spec NAME",
    "--static v6e --record --spec bshd_full_qk64_v64": "--record writes the whole table: leave out --spec",
    "--static v6e --spec bshd_full_qk64_v64 --tile backward=512x512": "--tile backward: there is no such kernel; "
    "pallas_tpu/bshd_full_qk64_v64 has forward, dq, dkv, dbias",
    "--static v6e --spec bshd_full_qk64_v64 --tile forward=512": "--tile forward=512: expected KERNEL=QxKV, such as "
    "forward=2048x1024, or KERNEL=FIELD=N",
    "--static v6e --spec bshd_full_qk64_v64 --tile forward=512x512,width=2": "--tile forward: a tile has no width; it has "
    "block_q, block_kv, num_warps, num_stages, inner_q, inner_kv, lead, lag",
    "--static v6e --spec triton/bshd_full_qk64_v64": "--spec triton/bshd_full_qk64_v64: --static measures pallas_tpu kernels",
    "--static 7x --workload ring": "--workload ring is of v6e, not of 7x",
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_what_the_command_refuses(arguments, capsys):
    assert command.main(arguments.split()) == 2
    assert capsys.readouterr().err.strip() == f"eqx_attn.bench could not run: {REFUSED[arguments]}"


def _tuned(monkeypatch, cycles, choices):
    """`tune` of two sizes, where `cycles` says what a step of each takes, or why it does not compile."""
    monkeypatch.setattr(_static_tune, "CHOICES", {name: (512, 1024) for name in choices})
    monkeypatch.setattr(_static_tune, "GROUPS", (tuple(choices),))

    def measure(jobs):
        for job in jobs:
            tile = _static_spec.tiles_of(spec, "v6e", 8192, job.arguments[4]).forward
            found = cycles(tile)
            yield job, found if isinstance(found, str) else _measured(found, tile)

    spec = KernelSpec.from_name("pallas_tpu/bshd_full_qk128_v128")
    return _static_tune.tune(spec, "v6e", "fwd", 8192, measure)


def test_the_tuner_takes_the_faster_tile(monkeypatch):
    """Cycles by score: those of a block of 512 keys are fewest."""
    found = _tuned(monkeypatch, lambda tile: tile.block_q * (tile.block_kv + 100 * (tile.block_kv > 512)), ["block_kv"])
    assert found.overrides == (("forward", (("block_kv", 512),)),)
    assert found.tiles.forward.block_kv == 512 and found.after > found.before


def test_the_tuner_passes_over_what_does_not_compile(monkeypatch):
    found = _tuned(monkeypatch, lambda tile: 10**6 if tile.block_q == 512 else "out of memory", ["block_q"])
    assert found.tiles.forward.block_q == 512 and found.before is None
    with pytest.raises(_static_tune.NothingCompiles, match="no tile of .*bshd_full_qk128_v128 compiles for v6e, fwd"):
        _tuned(monkeypatch, lambda tile: "out of memory", ["block_q"])


def test_kernels_follow_the_table_that_the_tuner_writes(monkeypatch, tmp_path):
    found = _tuned(monkeypatch, lambda tile: tile.block_q * tile.block_kv + tile.block_q, ["block_q", "block_kv"])
    _static_tune.write_table(tmp_path / "tiles", [found])
    monkeypatch.setattr(_tuning_tpu, "__file__", str(tmp_path / "_tuning_tpu.py"))
    _tuning_tpu._table.cache_clear()
    try:
        tiles = _static_spec.tiles_of(found.spec, "v6e", 8192)
        assert (tiles.forward, tiles.dkv) == (found.tiles.forward, found.tiles.dkv)
        narrower = KernelSpec.from_name("pallas_tpu/bshd_full_qk96_v96")
        assert _static_spec.tiles_of(narrower, "v6e", 8192).forward == found.tiles.forward
    finally:
        _tuning_tpu._table.cache_clear()
