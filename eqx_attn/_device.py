"""What a generated kernel imports from eqx_attn, and nothing else."""

from ._precision import dot_precision as dot_precision
from ._summaries import block_summary as block_summary, visited_range as visited_range
from ._triton_call import triton_call as triton_call
