"""What a generated kernel imports from eqx_attn, and nothing else."""

from ._triton_call import triton_call as triton_call
