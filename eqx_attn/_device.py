"""What a generated kernel imports from eqx_attn, and nothing else."""

from ._dropout import column_hash as column_hash, row_hash as row_hash, threshold as threshold
from ._map_blocks import has_bit as has_bit, map_blocks as map_blocks
from ._map_words import words_of_map as words_of_map
from ._mod_evaluate import captured_totals as captured_totals
from ._pallas import (
    column as column,
    dot as dot,
    drawn as drawn,
    fit_block as fit_block,
    interpret_params as interpret_params,
    matmul_precision as matmul_precision,
    pad_rows as pad_rows,
    pad_segments as pad_segments,
    tanh as tanh,
    VMEM_LIMIT_BYTES as VMEM_LIMIT_BYTES,
    zero_tail as zero_tail,
)
from ._precision import dot_precision as dot_precision
from ._score_blocks import dropout_blocks as dropout_blocks, score_blocks as score_blocks
from ._sinks import sinks_gradient as sinks_gradient
from ._summaries import block_summary as block_summary, visited_ranges as visited_ranges
from ._triton_call import triton_call as triton_call
from ._triton_lists import tile_visibility as tile_visibility, visited_lists as visited_lists
from ._triton_matrices import (
    bias_parts as bias_parts,
    matrix_shape as matrix_shape,
    sum_of_parts as sum_of_parts,
)
from ._visits import (
    band_kv_visits as band_kv_visits,
    band_q_visits as band_q_visits,
    map_kv_visits as map_kv_visits,
    map_q_visits as map_q_visits,
    segment_kv_visits as segment_kv_visits,
    segment_q_visits as segment_q_visits,
)
