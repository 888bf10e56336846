import dataclasses
import re

import pytest
from hypothesis import given, strategies as st

from codegen.matrix import checked_in
from codegen.spec import KernelSpec, Layout, MaskKind, MAX_HEAD_DIM, nearest, SpecError, Target


def values(field: dataclasses.Field) -> st.SearchStrategy:
    """Every value of a field for which there can be a kernel; a field of a new kind fails here until it is covered."""
    if field.type is bool:
        return st.booleans()
    if field.type is int:
        return st.integers(1, MAX_HEAD_DIM // 8).map(lambda eighth: 8 * eighth)
    if field.type is str:  # the digest of a function, or none
        return st.one_of(st.just(""), st.text(alphabet="0123456789abcdef", min_size=12, max_size=12))
    return st.sampled_from(list(field.type))


specs = st.builds(KernelSpec, **{field.name: values(field) for field in dataclasses.fields(KernelSpec)})


@pytest.mark.smoke
@given(specs)
def test_a_name_reads_back(spec):
    assert KernelSpec.from_name(spec.name) == spec
    assert (spec.refusal() is None) == (not spec.refusals())


@given(specs, specs)
def test_two_kernels_never_share_a_file(first, second):
    # Folded, since some file systems do not tell upper case from lower.
    assert (first == second) == (first.name.casefold() == second.name.casefold())


@given(st.text(alphabet="abcdhsqkv0123456789_/", max_size=40))
def test_any_other_text_is_an_error_with_the_form_of_a_name(text):
    try:
        spec = KernelSpec.from_name(text)
    except SpecError as error:
        assert repr(text) in str(error)
        assert "a name reads target/layout_mask_qkDIM_vDIM" in str(error)
    else:
        assert spec.name == text


@pytest.mark.parametrize(
    "name, message",
    [
        ("cuda/bshd_causal_qk64_v64", "'cuda' where one of pallas_tpu, triton"),
        ("triton/sbhd_causal_qk64_v64", "'sbhd' where one of bshd, bhsd, qkv, kv belongs"),
        ("triton/bshd_causal_64_v64", "'64' where its qk_dim belongs"),
        ("triton/bshd_causal_qk64", "ends before its v_dim"),
        ("triton/bshd_causal_qk64_v64_segment", "'segment' left over"),
        ("triton/bshd_segments_causal_qk64_v64", "'segments' where one of full, causal, window belongs"),
        ("triton/bshd_causal_qk064_v64", "is written 'triton/bshd_causal_qk64_v64'"),
        ("triton", "'' where one of bshd, bhsd, qkv, kv belongs"),
    ],
)
def test_a_wrong_name_says_what_is_wrong(name, message):
    with pytest.raises(SpecError, match=re.escape(message)):
        KernelSpec.from_name(name)


@pytest.mark.parametrize("field", ["qk_dim", "v_dim"])
@pytest.mark.parametrize("dim", [0, 4, 100, 264, -8])
def test_a_head_dim_without_a_kernel_is_named(field, dim):
    spec = KernelSpec(Target.TRITON, Layout.BSHD, MaskKind.FULL, 64, 64)
    (reason,) = dataclasses.replace(spec, **{field: dim}).refusals()
    assert reason.startswith(f"{field} is {dim}; kernels exist for multiples of 8 from 8 to 256: pad the head dim")
    assert spec.refusals() == []


def test_a_packed_array_has_one_head_dim():
    (reason, *_) = KernelSpec(Target.TRITON, Layout.QKV, MaskKind.FULL, 64, 128).refusals()
    assert reason == "qk_dim is 64 and v_dim 128; a packed array has one head dim"


def test_nearest_finds_a_typing_error():
    names = [spec.name for spec in checked_in()]
    assert nearest("triton/bshd_casual_qk128_v128", names)[0] == "triton/bshd_causal_qk128_v128"
    assert nearest("something else", names) == []
