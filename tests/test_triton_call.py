"""The Triton binding: lowering for GPUs that are not here, and running on the CPU under Triton's interpreter."""

import re
import subprocess
import sys
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_attn import _triton_call, _triton_versions
from eqx_attn._context import current_context, interpret, resume, target
from eqx_attn._device import triton_call
from eqx_attn._triton_arguments import TensorDescriptor
from eqx_attn._triton_call import collect_compiled, CompiledKernel
from eqx_attn._triton_inspect import compile_for_target, inspect_compiled
from eqx_attn._triton_interpreter import _Interpreted, _interpreted_language
from eqx_attn._triton_versions import ptx_version, require_launcher

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from triton.experimental import gluon  # noqa: E402
from triton.experimental.gluon import language as gl  # noqa: E402
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma  # noqa: E402

CUSTOM_CALL = "triton_kernel_call_ffi"
HALF = tl.constexpr(0.5)


@triton.jit
def base_two(score, scale):
    return tl.exp2(score * scale)


@triton.jit
def exp_matmul_kernel(
    left_ptr, right_ptr, rows, columns, inner, scale, out_ptr, max_ptr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr = 16,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(0, tl.cdiv(inner, BLOCK_K)):
        k = step * BLOCK_K + tl.arange(0, BLOCK_K)
        left_mask = (row[:, None] < rows) & (k[None, :] < inner)
        right_mask = (k[:, None] < inner) & (column[None, :] < columns)
        left = tl.load(left_ptr + row[:, None] * inner + k[None, :], mask=left_mask, other=0.0)
        right = tl.load(right_ptr + k[:, None] * columns + column[None, :], mask=right_mask, other=0.0)
        acc = tl.dot(left, right, acc)
    out = tl.where(column[None, :] < columns, base_two(acc, scale * HALF), 0.0)
    mask = (row[:, None] < rows) & (column[None, :] < columns)
    tl.store(out_ptr + row[:, None] * columns + column[None, :], out, mask=mask)
    tl.store(max_ptr + row, tl.max(out, 1), mask=row < rows)


def exp_matmul(left, right, block_m=32, block_n=32, num_stages=2, num_warps=4, **constants):
    """`2**(left @ right)` and its maximum over each row."""
    (rows, inner), columns = left.shape, right.shape[1]
    return triton_call(
        exp_matmul_kernel,
        left,
        right,
        rows,
        columns,
        inner,
        2.0,
        outputs=[jax.ShapeDtypeStruct((rows, columns), jnp.float32), jax.ShapeDtypeStruct((rows,), jnp.float32)],
        grid=(triton.cdiv(rows, block_m),),
        num_warps=num_warps,
        num_stages=num_stages,
        constants=dict(BLOCK_M=block_m, BLOCK_N=block_n) | constants,
    )


def exp_matmul_operands(dtype):
    left = jax.random.normal(jax.random.key(0), (45, 70), dtype) / 8
    return left, jax.random.normal(jax.random.key(1), (70, 27), dtype)


@triton.jit
def chunked_sum_kernel(x_ptr, length, offset, sum_ptr, chunks_ptr, BLOCK: tl.constexpr, SQUARED: tl.constexpr):
    """A while loop, an int beyond 31 bits, a method of tensors, a branch on a constant."""
    total = tl.zeros([BLOCK], tl.float32)
    start = 0
    chunks = 0
    while start < length:
        index = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + index, mask=index < length, other=0.0)
        if SQUARED:
            x = x * x
        total += x
        start += BLOCK
        chunks += 1
    tl.store(sum_ptr, total.sum(axis=0))
    tl.store(chunks_ptr, chunks + offset)


def chunked_sum(x, squared, offset=2**40):
    # An int64 result needs x64 mode outside; the sum with 2**40 wraps in int32.
    outputs = [jax.ShapeDtypeStruct((1,), jnp.float32), jax.ShapeDtypeStruct((1,), jnp.int32)]
    constants = dict(BLOCK=8, SQUARED=squared)
    return triton_call(
        chunked_sum_kernel,
        x,
        x.size,
        offset,
        outputs=outputs,
        grid=(1,),
        num_warps=1,
        num_stages=1,
        constants=constants,
    )


@triton.jit
def copy_kernel(x_ptr, from_row, to_row, count, out_ptr, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + from_row + index, mask=index < count)
    tl.store(out_ptr + to_row + index, x, mask=index < count)


def copy(x, from_row, to_row, count):
    outputs = [jax.ShapeDtypeStruct(x.shape, x.dtype)]
    arguments = (x, from_row, to_row, count)
    return triton_call(
        copy_kernel, *arguments, outputs=outputs, grid=(1,), num_warps=1, num_stages=1, constants=dict(BLOCK=16)
    )[0]


@triton.jit
def descriptor_kernel(x_desc, scale, out_ptr, out_desc, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK
    x = x_desc.load([row, 0])
    out_desc.store([row, 0], (x * scale).to(x.dtype))
    tl.store(out_ptr + row + tl.arange(0, BLOCK), tl.sum(x.to(tl.float32), 1))


@gluon.jit
def gluon_default(smem, out_ptr, ready, BLOCK: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    mbarrier.wait(ready, 0)
    x = smem.load(layout)
    row = gl.arange(0, BLOCK, gl.SliceLayout(1, layout))
    column = gl.arange(0, BLOCK, gl.SliceLayout(0, layout))
    gl.store(out_ptr + gl.expand_dims(row, 1) * BLOCK + gl.expand_dims(column, 0), x)


@gluon.jit
def gluon_producer(x_desc, smem, ready):
    mbarrier.expect(ready, x_desc.block_type.nbytes)
    tma.async_load(x_desc, [0, 0], ready, smem)


@gluon.jit
def gluon_copy_kernel(x_desc, out_ptr, BLOCK: gl.constexpr):
    smem = gl.allocate_shared_memory(x_desc.dtype, x_desc.block_type.shape, x_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    gl.warp_specialize(
        [(gluon_default, (smem, out_ptr, ready, BLOCK)), (gluon_producer, (x_desc, smem, ready))], [1], [24]
    )


def gluon_copy(x):
    block = x.shape[0]
    layout = gl.NVMMASharedLayout.get_default_for([block, block], gl.float16)
    return triton_call(
        gluon_copy_kernel,
        TensorDescriptor(x, (block, block), layout),
        outputs=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
        grid=(1,),
        num_warps=4,
        num_stages=1,
        constants=dict(BLOCK=block),
    )[0]


def descriptor_copy(x, block=32):
    outputs = [
        jax.ShapeDtypeStruct(x.shape[:1], jnp.float32),
        TensorDescriptor(jax.ShapeDtypeStruct(x.shape, x.dtype), (block, x.shape[1])),
    ]
    return triton_call(
        descriptor_kernel,
        TensorDescriptor(x, (block, x.shape[1])),
        2.0,
        outputs=outputs,
        grid=(x.shape[0] // block,),
        num_warps=4,
        num_stages=1,
        constants=dict(BLOCK=block),
    )


class TestInterpreter:
    @pytest.mark.smoke
    @pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
    def test_matmul_equals_numpy(self, dtype):
        left, right = exp_matmul_operands(dtype)
        with interpret():
            out, maximum = jax.jit(exp_matmul)(left, right)
        exponent = np.asarray(left, np.float64) @ np.asarray(right, np.float64)
        # Products of float16 are exact in float32; each of the 70 sums rounds by at most eps of the sum of magnitudes.
        magnitude = np.abs(np.asarray(left, np.float64)) @ np.abs(np.asarray(right, np.float64))
        bound = 71 * np.finfo(np.float32).eps * magnitude * np.log(2) + 4 * np.finfo(np.float32).eps
        assert (np.abs(np.asarray(out) / np.exp2(exponent) - 1) <= bound).all()
        np.testing.assert_array_equal(maximum, np.asarray(out).max(1))

    @pytest.mark.smoke
    def test_eager_equals_jitted(self):
        left, right = exp_matmul_operands(jnp.float16)
        with interpret():
            for eager, jitted in zip(exp_matmul(left, right), jax.jit(exp_matmul)(left, right), strict=True):
                np.testing.assert_array_equal(eager, jitted)

    @pytest.mark.parametrize("squared", [False, True])
    def test_while_loop_branch_and_int_scalars(self, squared):
        x = jnp.arange(1.0, 29.0)
        with interpret():
            total, chunks = chunked_sum(x, squared, offset=7)
        assert total == jnp.sum(x**2 if squared else x)  # integers: exact
        assert chunks == 4 + 7

    def test_descriptors(self):
        x = jax.random.normal(jax.random.key(2), (64, 16), jnp.float16)
        with interpret():
            sums, doubled = descriptor_copy(x)
        np.testing.assert_array_equal(doubled, np.asarray(x) * 2)
        # 16 float16 summed in float32, in any order.
        bound = 16 * np.finfo(np.float32).eps * np.abs(np.asarray(x, np.float64)).sum(1)
        assert (np.abs(np.asarray(sums) - np.asarray(x, np.float64).sum(1)) <= bound).all()

    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.int32])
    def test_what_is_not_written_shows(self, dtype):
        with interpret():
            out = copy(jnp.ones(12, dtype), 0, 0, 5)
        poison = np.nan if dtype == jnp.float32 else np.iinfo(np.int32).min
        np.testing.assert_array_equal(out, np.r_[np.ones(5), np.full(7, poison)])

    @pytest.mark.parametrize("to_row", [-1, 8])
    def test_a_write_beyond_an_end_is_an_error(self, to_row):
        with interpret(), pytest.raises(jax.errors.JaxRuntimeError, match=r"wrote outside output 0 of shape \(12,\)"):
            copy(jnp.ones(12), 0, to_row, 5).block_until_ready()

    def test_a_read_beyond_an_end_gives_nan(self):
        with interpret():
            out = copy(jnp.ones(12), 8, 0, 12)
        np.testing.assert_array_equal(out, np.r_[np.ones(4), np.full(8, np.nan)])

    def test_bfloat16_is_refused(self):
        left, right = exp_matmul_operands(jnp.bfloat16)
        with interpret(), pytest.raises(ValueError, match=r"bfloat16 array of shape \(45, 70\).*float16 or float32"):
            exp_matmul(left, right)

    def test_gluon_is_refused(self):
        with interpret(), pytest.raises(ValueError, match="gluon_copy_kernel is a Gluon kernel"):
            gluon_copy(jnp.ones((64, 64), jnp.float16))

    def test_many_calls_in_flight(self):
        left, right = exp_matmul_operands(jnp.float16)
        with interpret():
            results = [exp_matmul(left, right)[0] for _ in range(8)]
            chained = jax.jit(lambda x: copy(copy(copy(x, 0, 0, 12) + 1, 0, 0, 12), 0, 0, 12))(jnp.zeros(12))
        np.testing.assert_array_equal(chained, np.ones(12))
        for result in results[1:]:
            np.testing.assert_array_equal(result, results[0])


def _patched_names():
    """What of `triton.language` is the interpreter's."""
    owners = (tl, tl.core, tl.math, tl.standard, tl.random, tl.core.tensor, tl.core.dtype, tl.core.condition)
    return [
        (owner.__name__, name)
        for owner in (*owners, tl.core.tensor_descriptor_base)
        for name, value in vars(owner).items()
        if isinstance(value, _Interpreted) or getattr(value, "__module__", "") == "triton.runtime.interpreter"
    ]


class TestInterpreterAndCompiler:
    """Both live in one process."""

    def test_the_interpreter_leaves_no_trace(self):
        names = set(exp_matmul_kernel.fn.__globals__)
        with interpret():
            jax.block_until_ready(exp_matmul(*exp_matmul_operands(jnp.float16)))
            jax.block_until_ready(chunked_sum(jnp.ones(20), True, offset=1))
        with _interpreted_language():
            assert len(_patched_names()) > 100
        assert _patched_names() == []
        assert set(exp_matmul_kernel.fn.__globals__) == names

    def test_interpret_compile_interpret(self):
        left, right = exp_matmul_operands(jnp.float16)
        with target("sm_90a"):
            (before,) = compile_for_target(lambda *x: exp_matmul(*x, block_n=64), left, right)
        with interpret():
            first = exp_matmul(left, right)[0].block_until_ready()
        with target("sm_90a"), pytest.MonkeyPatch.context() as patch:
            patch.setattr(_triton_call, "_compiled", {})
            patch.setenv("TRITON_ALWAYS_COMPILE", "1")
            (after,) = compile_for_target(lambda *x: exp_matmul(*x, block_n=64), left, right)
        with interpret():
            second = exp_matmul(left, right)[0]
        assert after.ptx == before.ptx
        np.testing.assert_array_equal(first, second)

    def test_compile_while_interpreting_in_a_thread(self, monkeypatch):
        left, right = exp_matmul_operands(jnp.float16)
        monkeypatch.setattr(_triton_call, "_compiled", {})
        monkeypatch.setenv("TRITON_ALWAYS_COMPILE", "1")
        failures, stop = [], threading.Event()

        def keep_interpreting():
            try:
                with interpret():
                    while not stop.is_set():
                        jax.block_until_ready(exp_matmul(left, right))
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=keep_interpreting)
        thread.start()
        try:
            with target("sm_80"):
                for block_n in (32, 64, 128):
                    compile_for_target(lambda *x, n=block_n: exp_matmul(*x, block_n=n), left, right)
        finally:
            stop.set()
            thread.join()
        assert not failures


def _lowered_for_cuda(function, *arguments):
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


class TestLowering:
    @pytest.mark.smoke
    @pytest.mark.parametrize("name", ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100"])
    def test_lowers_for_a_gpu_that_is_not_here(self, name):
        left, right = exp_matmul_operands(jnp.bfloat16)
        with target(name), collect_compiled() as kernels:
            text = _lowered_for_cuda(lambda *x: exp_matmul(*x, block_m=64), left, right)
        assert CUSTOM_CALL in text
        (kernel,) = kernels
        assert f".target {name}" in kernel.ptx
        report = inspect_compiled(kernel)
        assert report.spill_bytes == 0
        assert 0 < report.registers <= 255
        expected = {"sm_90a": "wgmma.mma_async", "sm_100": "tcgen05.mma"}.get(name, "mma.sync")
        assert report.tensor_core_instructions
        assert all(instruction.startswith(expected) for instruction in report.tensor_core_instructions)

    def test_no_tensor_core_is_reported_where_there_is_no_product(self):
        with target("sm_90a"):
            (kernel,) = compile_for_target(lambda x: copy(x, 0, 0, 12), jnp.ones(12))
        assert inspect_compiled(kernel).tensor_core_instructions == ()

    @pytest.mark.smoke
    def test_export(self):
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in exp_matmul_operands(jnp.float16)]
        check = jax.export.DisabledSafetyCheck.custom_call(CUSTOM_CALL)
        with target("sm_90a"):
            exported = jax.export.export(jax.jit(exp_matmul), platforms=["cuda"], disabled_checks=[check])(*shapes)
        assert CUSTOM_CALL in exported.mlir_module()
        assert [aval.shape for aval in exported.out_avals] == [(45, 27), (45,)]

    def test_tracing_compiles_nothing(self):
        with target("sm_90a"), collect_compiled() as kernels:
            jax.make_jaxpr(exp_matmul)(*exp_matmul_operands(jnp.float16))
        assert kernels == []

    def test_the_target_is_part_of_the_cache_key_of_jit(self):
        operands = exp_matmul_operands(jnp.float16)
        jitted = jax.jit(exp_matmul)
        for name, capability in (("sm_80", 80), ("sm_90a", 90), ("sm_80", 80)):
            with target(name):
                assert f"capability={capability}" in str(jitted.trace(*operands).jaxpr)
        with interpret():
            assert "pure_callback" in str(jitted.trace(*operands).jaxpr)

    def test_compiled_once(self, monkeypatch):
        operands = exp_matmul_operands(jnp.float16)
        with target("sm_80"):
            (first,) = compile_for_target(exp_matmul, *operands)
            monkeypatch.setattr(triton, "compile", None)
            (second,) = compile_for_target(exp_matmul, *operands)
        assert first is second

    @pytest.mark.smoke
    def test_gluon_goes_through_its_own_pipeline(self):
        x = jnp.ones((64, 64), jnp.float16)
        with target("sm_90a"), collect_compiled() as kernels:
            text = _lowered_for_cuda(gluon_copy, x)
        assert CUSTOM_CALL in text
        (kernel,) = kernels
        # Four warps were asked for; the producer's are added, and all must be launched.
        assert kernel.num_warps == 8
        assert kernel.ttir == ""
        assert "cp.async.bulk.tensor.2d" in kernel.ptx

    def test_launcher_parameters(self, monkeypatch):
        """A pointer, a number, and a TMA descriptor followed by its shape (int32) and strides (int64), in order."""
        real = require_launcher()
        recorded = []

        def record(kind):
            create = getattr(real, f"create_{kind}_parameter")

            def create_and_record(*args, **kwargs):
                recorded.append((kind, *args, *kwargs.values()))
                return create(*args, **kwargs)

            return create_and_record

        fake = types.SimpleNamespace(TritonKernel=real.TritonKernel, TritonKernelCall=real.TritonKernelCall)
        for kind in ("array", "scalar", "tma_descriptor"):
            setattr(fake, f"create_{kind}_parameter", record(kind))
        monkeypatch.setattr(_triton_call, "require_launcher", lambda: fake)
        with target("sm_90a"):
            _lowered_for_cuda(descriptor_copy, jnp.ones((64, 16), jnp.float16))
        half = 6  # CU_TENSOR_MAP_DATA_TYPE_FLOAT16
        descriptor = ("tma_descriptor", half, 1, (64, 16), (16, 1), [32, 16], 0)
        shape_and_strides = [("scalar", 64, "i32"), ("scalar", 16, "i32"), ("scalar", 16, "i64"), ("scalar", 1, "i64")]
        assert recorded == [
            descriptor,
            *shape_and_strides,
            ("scalar", 2.0, "fp32"),
            ("array", 0, 16),
            descriptor,
            *shape_and_strides,
        ]

    def test_scalars_have_their_types(self):
        with target("sm_80"):
            (kernel,) = compile_for_target(lambda x: chunked_sum(x, False), jnp.ones(20))
        # x, length, offset (beyond 31 bits), two outputs
        signature = kernel.ttir[kernel.ttir.index("tt.func public") :].splitlines()[0]
        assert re.findall(r"%\w+: ([^\s,)]+)", signature) == [
            "!tt.ptr<f32>",
            "i32",
            "i64",
            "!tt.ptr<f32>",
            "!tt.ptr<i32>",
        ]

    def test_multiples_of_16_are_announced(self):
        with target("sm_80"):
            (kernel,) = compile_for_target(lambda x: copy(x, 32, 3, 12), jnp.ones(12))
        signature = kernel.ttir[kernel.ttir.index("tt.func public") :].splitlines()[0]
        # x_ptr, from_row = 32, out_ptr, but neither to_row = 3 nor count = 12
        assert signature.count("tt.divisibility = 16") == 3


class TestErrors:
    def test_lowering_for_the_cpu(self):
        operands = exp_matmul_operands(jnp.float16)
        with target("sm_90a"), pytest.raises(ValueError, match=r"lowered for cpu.*NVIDIA GPU.*eqx_attn\.interpret\(\)"):
            exp_matmul(*operands)

    @pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU to compile for")
    def test_no_gpu_and_no_target(self):
        with pytest.raises(ValueError, match=r"no NVIDIA GPU.*eqx_attn\.target\('sm_90a'\).*eqx_attn\.interpret\(\)"):
            exp_matmul(*exp_matmul_operands(jnp.float16))

    def test_a_tpu_is_not_a_target_for_triton(self):
        with target("v6e"), pytest.raises(ValueError, match=r"target\('v6e'\) is not an NVIDIA GPU"):
            exp_matmul(*exp_matmul_operands(jnp.float16))

    def test_unknown_target(self):
        with pytest.raises(ValueError, match="unknown device 'sm_91'; known are sm_80, .*7x"), target("sm_91"):
            pass

    def test_shared_memory(self):
        left = jnp.ones((256, 512), jnp.float32)
        right = jnp.ones((512, 256), jnp.float32)
        large = dict(block_m=256, block_n=256, num_stages=4, num_warps=8, BLOCK_K=64)
        message = r"needs \d+ bytes of shared memory, but a block on capability 86 has 101376; use smaller tiles"
        with target("sm_86"), pytest.raises(ValueError, match=message):
            compile_for_target(lambda *x: exp_matmul(*x, **large), left, right)

    def test_descriptors_before_hopper(self):
        with target("sm_80"), pytest.raises(ValueError, match="TensorDescriptor, which needs.*capability 90"):
            descriptor_copy(jnp.ones((64, 16), jnp.float16))

    def test_descriptor_strides(self):
        with target("sm_90a"), pytest.raises(ValueError, match=r"input 0.*strides \(17, 1\) of 2-byte.*Pad the last"):
            descriptor_copy(jnp.ones((64, 17), jnp.float16))

    @pytest.mark.parametrize(
        ("inputs", "change", "error", "message"),
        [
            ((1, 2), {}, TypeError, "has 5 run-time parameters, found 3 inputs and 1 outputs"),
            ((1, 2, True), {}, TypeError, "input 3 must be an array.*found bool.*belongs in `constants`"),
            ((1, 2, "3"), {}, TypeError, "input 3 must be an array.*found str"),
            ((1, 2, 2**63), {}, ValueError, "input 3 is 9223372036854775808, which does not fit 64 bits"),
            ((1, 2, 3), dict(constants={}), TypeError, r"parameters \['BLOCK'\].*the difference is \['BLOCK'\]"),
            ((1, 2, 3), dict(constants=dict(BLOCK=16, B=1)), TypeError, r"the difference is \['B'\]"),
            ((1, 2, 3), dict(grid=(1, 0)), ValueError, r"grid must be one to three positive ints, found \(1, 0\)"),
            ((1, 2, 3), dict(grid=(1, 1, 1, 1)), ValueError, "grid must be one to three"),
        ],
    )
    def test_arguments_that_do_not_add_up(self, inputs, change, error, message):
        x = jnp.ones(12)
        options = dict(grid=(1,), num_warps=1, num_stages=1, constants=dict(BLOCK=16)) | change
        with target("sm_80"), pytest.raises(error, match=message):
            triton_call(copy_kernel, x, *inputs, outputs=[jax.ShapeDtypeStruct(x.shape, x.dtype)], **options)

    def test_a_dtype_that_triton_does_not_know(self):
        with target("sm_80"), pytest.raises(TypeError, match="input 0 has dtype complex64"):
            copy(jnp.ones(12, jnp.complex64), 0, 0, 12)


class TestVersions:
    INSTALL = r"pip install 'eqx_attn\[cuda\]'` \(triton 3\.9\.0, jax 0\.11\.2 or 0\.12\.0\.1\)"

    def test_triton_missing(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "triton", None)
        with pytest.raises(ImportError, match=f"Triton, which is not installed.*{self.INSTALL}"):
            copy(jnp.ones(12), 0, 0, 12)

    def test_another_triton(self, monkeypatch):
        """Case 30."""
        monkeypatch.setattr(triton, "__version__", "3.6.0")
        with pytest.raises(ImportError, match=f"triton 3.6.0 is not known to work.*{self.INSTALL}"):
            copy(jnp.ones(12), 0, 0, 12)

    def test_another_jax(self, monkeypatch):
        """Case 30."""
        monkeypatch.setattr(_triton_versions, "jax", types.SimpleNamespace(__version__="0.13.1"))
        with pytest.raises(ImportError, match=f"jax 0.13.1 is not known to work.*{self.INSTALL}"):
            copy(jnp.ones(12), 0, 0, 12)

    def test_plugin_missing(self, monkeypatch):
        monkeypatch.delattr(require_launcher(), "TritonKernelCall")
        with target("sm_80"), pytest.raises(ImportError, match=f"JAX's CUDA plugin, missing or .*{self.INSTALL}"):
            _lowered_for_cuda(lambda x: copy(x, 0, 0, 12), jnp.ones(12))

    def test_import_brings_no_triton(self):
        code = "import sys, eqx_attn._device; sys.exit('triton' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0

    @pytest.mark.parametrize(
        ("cuda", "ptx"),
        [(13000, 88), (13020, 88), (12090, 88), (12080, 87), (12060, 85), (12050, 85), (12020, 82)],
    )
    def test_ptx_version_that_cuda_takes(self, monkeypatch, cuda, ptx):
        from jax._src import lib

        monkeypatch.delenv("EQX_ATTN_PTX_VERSION", raising=False)
        versions = types.SimpleNamespace(cuda_runtime_build_version=lambda: cuda)
        monkeypatch.setattr(lib, "cuda_versions", versions)
        assert ptx_version() == ptx

    def test_ptx_version_without_plugin(self, monkeypatch):
        from jax._src import lib

        monkeypatch.setattr(lib, "cuda_versions", None)
        assert ptx_version() == 88

    def test_ptx_version_from_the_environment(self, monkeypatch):
        monkeypatch.setenv("EQX_ATTN_PTX_VERSION", "86")
        with target("sm_80"):
            (kernel,) = compile_for_target(lambda x: copy(x, 0, 0, 12), jnp.ones(12))
        assert ".version 8.6" in kernel.ptx
        monkeypatch.setenv("EQX_ATTN_PTX_VERSION", "8.6")
        with pytest.raises(ValueError, match="EQX_ATTN_PTX_VERSION must be a number such as 88, found '8.6'"):
            ptx_version()


class TestCacheDirectory:
    @staticmethod
    def _compile(monkeypatch) -> CompiledKernel:
        monkeypatch.setattr(_triton_call, "_compiled", {})
        with target("sm_80"):
            return compile_for_target(lambda x: copy(x, 0, 0, 12), jnp.ones(12))[0]

    def test_the_chosen_one_is_used(self, monkeypatch, tmp_path):
        monkeypatch.setenv("EQX_ATTN_CACHE_DIR", str(tmp_path))
        before = triton.knobs.cache.dir
        first = self._compile(monkeypatch)
        assert list((tmp_path / "triton").rglob("copy_kernel.cubin"))
        assert triton.knobs.cache.dir == before
        assert self._compile(monkeypatch) == first

    def test_one_that_cannot_be_written(self, monkeypatch, tmp_path):
        (tmp_path / "file").touch()
        monkeypatch.setenv("EQX_ATTN_CACHE_DIR", str(tmp_path / "file"))
        assert "copy_kernel" in self._compile(monkeypatch).ptx


def test_a_context_can_be_resumed_after_its_end():
    with target("sm_90a"), interpret():
        context = current_context()
    assert current_context() != context
    with target("v6e"), resume(context):
        assert current_context() == context
    assert (context.targets, context.interpreting) == (("sm_90a",), True)
