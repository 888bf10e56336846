"""The static measure: reading what libtpu dumps, and what its command refuses. Compiling takes seconds, so few kernels do."""

import pytest

from eqx_attn.bench import _bundles, _static_rows, _static_spec, _steps
from eqx_attn.bench._static import Block, Kernel, Measured
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


def _measured(cycles):
    step = _steps.Step(cycles, {"matrix": 1.0}, 1.0, 1.0, 0, 0)
    steps = _steps.Steps(step, (), 0, 0, 0, (), 0, 4)
    return Measured((Kernel("attention", 0, 0, (4,), steps, Block(1024, 1024, 1)),), 0.0)
