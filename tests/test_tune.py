"""Tile tables of GPU kernels, and `--tune` without a GPU: what it tries, what it chooses, and how it goes on."""

import json
import types

import jax
import pytest

import eqx_attn
from eqx_attn import _serve, _tile_tables, _tuning
from eqx_attn._codegen import KernelSpec
from eqx_attn._operands import Tile, Tiles
from eqx_attn.bench import __main__ as command, _tune, _tune_candidates, _tune_command
from eqx_attn.bench._implementations import ours
from eqx_attn.bench._tune_candidates import candidates, case_of, Sweep

CAUSAL = KernelSpec.from_name("triton/bshd_causal_qk128_v128")
SWEEP = Sweep("forward", (Tile(64, 32, 4, 2), Tile(128, 64, 8, 3)))
H200 = types.SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0")
H100 = types.SimpleNamespace(platform="gpu", device_kind="NVIDIA H100 80GB HBM3", compute_capability="9.0")
A100 = types.SimpleNamespace(platform="gpu", device_kind="NVIDIA A100", compute_capability="8.0")


@pytest.fixture(autouse=True)
def _standard_promotion():
    """What users have."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """The user's cache and the repository's tables, both empty."""
    monkeypatch.setenv("EQX_ATTN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(_tile_tables, "REPOSITORY_TABLES", tmp_path / "repository")
    monkeypatch.setattr(_tune_command, "REPOSITORY_TABLES", tmp_path / "repository")
    return tmp_path / "cache" / "tiles", tmp_path / "repository"


def _write(folder, device, tile, spec=CAUSAL, direction="fwd", field="forward"):
    sweep = Sweep(field, SWEEP.tiles)
    path = _tile_tables.table_path(folder, device)
    _tune.write(path, _tune.Tuned(spec, direction, sweep, tile, 1.0, 2.0, 3, _tune.key_of(spec, sweep)), tile)
    return path


def test_tables_of_a_device(folders, monkeypatch):
    """The user's table has the last word, each field by itself; an H100 without a table has the H200's, an A100 nothing."""
    own, repository = folders
    before = _tuning.default_tiles(CAUSAL, "bfloat16", 4096, 4096)
    _write(repository, "NVIDIA H200", Tile(64, 32, 4, 2))
    _write(repository, "NVIDIA H200", Tile(32, 32, 8, 2), direction="bwd", field="dkv")
    on = lambda device: monkeypatch.setattr(jax, "local_devices", lambda: [device])
    tiles = lambda spec=CAUSAL, dtype="bfloat16": _tuning.default_tiles(spec, dtype, 4096, 4096)
    assert tiles() == before  # this CPU has no table
    on(H200)
    assert (tiles().forward, tiles().dkv) == (Tile(64, 32, 4, 2), Tile(32, 32, 8, 2))
    assert tiles(dtype="float32").dkv != Tile(32, 32, 8, 2)
    _write(own, "NVIDIA H200", Tile(128, 64, 8, 3))
    assert (tiles().forward, tiles().dkv) == (Tile(128, 64, 8, 3), Tile(32, 32, 8, 2))
    on(H100)
    assert tiles().forward == Tile(64, 32, 4, 2)
    on(A100)
    assert _tile_tables.tables_here() == tuple(_tile_tables.table_path(x, "NVIDIA A100") for x in (own, repository))
    with eqx_attn.target("sm_90a"):  # what is exported depends on no user's table
        assert tiles().forward == Tile(64, 32, 4, 2)
    with eqx_attn.target("sm_80"):
        assert _tile_tables.tables_here() == ()
    with eqx_attn.interpret():
        assert _tile_tables.tables_here() == ()


@pytest.mark.parametrize(
    "name, has",
    [
        ("triton/bhsd_causal_qk128_v128", True),
        ("triton/bshd_causal_qk128_v128_segments", False),
        ("triton/bshd_causal_qk128_v128_softcap", False),
        ("triton/bshd_full_qk128_v128", False),
        ("triton/bshd_causal_qk64_v64", False),
        ("triton/qkv_causal_qk128_v128", False),
        ("triton/bshd_causal_qk128_v128_scoremod0123456789ab", False),
    ],
)
def test_an_entry_serves_its_own_kernel_and_its_other_plain_layout(name, has, folders):
    path = _write(folders[1], "NVIDIA H200", Tile(64, 32, 4, 2))
    assert _tile_tables.tuned_tiles(path, KernelSpec.from_name(name)) == (
        {"forward": Tile(64, 32, 4, 2)} if has else {}
    )


def test_a_table_that_cannot_be_read_is_none(folders):
    path = _write(folders[0], "NVIDIA H200", Tile(64, 32, 4, 2))
    table = json.loads(path.read_text())
    table["triton"]["qk128_v128"]["causal"]["fwd"]["forward"]["tile"]["clusters"] = 2  # of another version
    path.write_text(json.dumps(table))
    assert _tile_tables.tuned_tiles(path, CAUSAL) == {}
    path.write_text("{")
    assert _tile_tables.tuned_tiles(path, CAUSAL) == {}


def test_tables_in_the_repository_are_of_kernels_and_tiles():
    """Every entry names a target, head dims and a kind that a kernel has, and only fields that tiles have."""
    for path in _tile_tables.REPOSITORY_TABLES.glob("NVIDIA*.json"):
        for name, dims in _tile_tables.table_of(path).items():
            for dim, kinds in dims.items():
                for kind, directions in kinds.items():
                    spec = _spec_of(name, dim, kind)
                    assert (_tile_tables.dims_of(spec), _tile_tables.kind_of(spec)) == (dim, kind)
                    fields = {field for found in directions.values() for field in found}
                    assert fields == set(_tile_tables.tuned_tiles(path, spec)) <= set(vars(Tiles(*3 * [Tile(1, 1)])))


def _spec_of(target: str, dims: str, kind: str) -> KernelSpec:
    layout = next((name for name in ("bhsd", "qkv", "kv") if kind.endswith(f"_{name}")), "bshd")
    mask, *options = kind.removesuffix(f"_{layout}").split("_")
    return KernelSpec.from_name("_".join([f"{target}/{layout}", mask, dims, *options]))


def test_a_trial_is_for_its_kernel_alone():
    other = KernelSpec.from_name("triton/bshd_full_qk128_v128")
    with _tile_tables.trial(CAUSAL, {"dq": Tile(16, 16)}) as tried:
        assert _tuning.default_tiles(other, "bfloat16", 1, 1).dq != Tile(16, 16) and not tried.used
        assert _tuning.default_tiles(CAUSAL, "bfloat16", 1, 1).dq == Tile(16, 16) and tried.used
    assert _tuning.default_tiles(CAUSAL, "bfloat16", 1, 1).dq != Tile(16, 16)


class _Served(Exception):
    """Says which kernel a call has got to."""


@pytest.mark.parametrize(
    "spec", [spec for spec, _, _ in _tune_command.work_of(None, "fwd")], ids=lambda spec: spec.name.replace("/", "-")
)
def test_the_call_of_a_kernel_is_served_by_it(spec, monkeypatch):
    """Every checked-in kernel that is tuned has a call of its own, and candidates for each of its gradients."""
    case = case_of(spec, 64)

    def attend(call, *_):
        raise _Served(call.default.spec)

    monkeypatch.setattr(_serve, "attend", attend)
    implementation = ours(case, str(spec.target))
    with eqx_attn.target("sm_90a"), pytest.raises(_Served) as served:
        jax.eval_shape(implementation.forward(), *jax.eval_shape(case.arrays), implementation.rest)
    assert served.value.args == (spec,)
    for direction, fields in (("fwd", ["forward"]), ("bwd", ["dq", "dkv", *(["dbias"] if spec.bias else [])])):
        sweeps = candidates(spec, direction)
        assert [sweep.field for sweep in sweeps] == fields
        assert all(len(set(sweep.tiles)) == len(sweep.tiles) > 7 for sweep in sweeps)


def test_present_tiles_stay_unless_others_are_clearly_faster():
    assert _tune.choose({"present": 1.0, "0": 0.995, "1": 2.0}) == ("present", 1.0)
    assert _tune.choose({"present": 1.0, "0": 0.97, "1": 0.98}) == ("0", 0.97)


def test_spills_are_found_without_a_gpu(monkeypatch):
    """A tile whose accumulators do not fit in registers is passed over, and one that no block has shared memory for."""
    pytest.importorskip("triton")
    monkeypatch.setattr(_tune, "case_of", lambda spec: case_of(spec, 16))
    sweep = Sweep("forward", (Tile(64, 64, 4, 3), Tile(128, 128, 4, 2), Tile(128, 128, 8, 8)))
    assert _tune.without_spills(CAUSAL, "fwd", sweep, 1, lambda text: None) == [Tile(64, 64, 4, 3)]


def test_a_sweep_times_what_is_left(monkeypatch):
    """The candidates take turns with the present tile; one that does not run is passed over."""
    monkeypatch.setattr(_tune, "without_spills", lambda *_: list(SWEEP.tiles))
    entry = lambda label: types.SimpleNamespace(implementation=types.SimpleNamespace(name=label))

    def make(label, spec, direction, sweep, tile, arguments):
        if tile == SWEEP.tiles[0]:
            raise RuntimeError("out of resources")
        return entry(label)

    monkeypatch.setattr(_tune, "_entry", make)
    monkeypatch.setattr(_tune, "case_of", lambda spec: case_of(spec, 64))
    samples = {("present", "call"): [3e-3, 2e-3, 9e-3], ("1", "call"): [1e-3, 2e-3, 2e-3]}
    monkeypatch.setattr(_tune, "_samples", lambda entries, repeats, advance: (samples, True))
    found = _tune.tune(CAUSAL, "fwd", SWEEP, 3, 1, lambda text: None)
    assert found.tile == SWEEP.tiles[1] and (found.ms, found.before_ms, found.ran) == (
        pytest.approx(2),
        pytest.approx(3),
        2,
    )
    monkeypatch.setattr(_tune, "_entry", lambda *_: (_ for _ in ()).throw(RuntimeError("no memory")))
    with pytest.raises(
        RuntimeError, match="present tiles of triton/bshd_causal_qk128_v128 do not run: RuntimeError: no memory"
    ):
        _tune.tune(CAUSAL, "fwd", SWEEP, 3, 1, lambda text: None)


def test_candidates_run_with_their_tiles(monkeypatch):
    """Under the interpreter, which takes any tile: the call is traced with the candidate's."""
    pytest.importorskip("triton")
    case = _tune_candidates.Case(1, 40, 1, 16, dtype="float32")
    spec = KernelSpec.from_name("triton/bshd_causal_qk16_v16")
    monkeypatch.setattr(_tune, "case_of", lambda _: case)
    seen = []
    builtin = _tile_tables.with_tuned
    monkeypatch.setattr(_tuning, "with_tuned", lambda *given: seen.append(builtin(*given).dq) or builtin(*given))
    with eqx_attn.interpret():
        sweep = Sweep("dq", (Tile(16, 32, 4, 2),))
        entry = _tune._entry("0", spec, "bwd", sweep, sweep.tiles[0], case.arrays())
        gradients, _ = entry.runs["call"]()
        assert set(gradients) == {"query", "key", "value"} and set(seen) == {Tile(16, 32, 4, 2)}
        with pytest.raises(AssertionError, match="served by another kernel"):
            _tune._entry("0", CAUSAL, "bwd", sweep, sweep.tiles[0], case.arrays())


def test_an_interrupted_run_goes_on(folders, monkeypatch, capsys):
    """What the user's table holds is skipped, unless the kernel or the candidates have changed; a failure stops nothing."""
    own, repository = folders
    paths = [_tile_tables.table_path(folder, "NVIDIA H200") for folder in folders]
    asked = []

    def tune(spec, direction, sweep, repeats, jobs, advance):
        asked.append((spec.name, sweep.field))
        if sweep.field == "dkv":
            raise RuntimeError("no")
        tile = sweep.tiles[3] if sweep.field == "forward" else None
        return _tune.Tuned(spec, direction, sweep, tile, 1.0, 2.0, 5, _tune.key_of(spec, sweep))

    monkeypatch.setattr(_tune_command, "tune", tune)
    work = _tune_command.work_of("triton/bshd_causal_qk128_v128", None)
    found, faults = _tune_command.tune_all(work, paths, 3, 1)
    assert [one.sweep.field for one in found] == ["forward", "dq"]
    assert faults == ["triton/bshd_causal_qk128_v128 dkv: RuntimeError: no"]
    present = _tune_command.present_tile(CAUSAL, "dq")
    for path in paths:
        assert _tile_tables.tuned_tiles(path, CAUSAL) == {"forward": work[0][2].tiles[3], "dq": present}
    _tune_command.tune_all(work, paths, 3, 1)
    assert [field for _, field in asked] == ["forward", "dq", "dkv", "dkv"]
    changed = [(spec, where, Sweep(sweep.field, sweep.tiles[1:])) for spec, where, sweep in work[:1]]
    _tune_command.tune_all(changed, paths, 3, 1)
    assert [field for _, field in asked][4:] == ["forward"]
    table = _tune_command.table_of(found, paths)
    assert [column.header for column in table.columns][3] == "best" and table.row_count == 2


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "--tune needs a GPU, and JAX's default backend here is 'cpu'"),
        (["--spec", "triton/nothing*"], "--spec triton/nothing* matches no checked-in kernel of triton"),
        (["--spec", "triton/bshd_causal"], "ends before its qk_dim"),
        (["--spec", "triton/bshd_causal_qk12_v12"], "qk_dim is 12"),
        (["--spec", "triton/bhsd_causal_qk64_v64"], "with the layouts bshd and qkv"),
        (["--spec", "pallas_tpu/bshd_causal_qk64_v64"], "--tune --static finds those of TPU kernels"),
    ],
)
def test_mistakes_are_one_sentence(arguments, message, capsys, monkeypatch):
    if arguments:
        monkeypatch.setattr(_tune_command.jax, "default_backend", lambda: "gpu")
    assert command.main(["--tune", *arguments]) == 2
    shown = capsys.readouterr().err
    assert message in shown and "Traceback" not in shown
