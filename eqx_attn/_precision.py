"""How products of float32 arrays are computed: what `jax_default_matmul_precision` asks for, in a kernel's terms."""

import jax

_TRITON = {
    None: "tf32",
    "default": "tf32",
    "bfloat16": "tf32",
    "fastest": "tf32",
    "tensorfloat32": "tf32",
    "high": "tf32x3",
    "bfloat16_3x": "tf32x3",
    "highest": "ieee",
    "float32": "ieee",
}


def dot_precision() -> str:
    """The `input_precision` of `tl.dot`; products of float16 and bfloat16 arrays do not depend on it."""
    return _TRITON.get(jax.config.jax_default_matmul_precision, "tf32")
