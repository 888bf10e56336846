"""What a generated kernel imports from eqx_attn, and nothing else."""

from ._distance_blocks import distance_blocks as distance_blocks
from ._dropout import column_hash as column_hash, row_hash as row_hash, threshold as threshold
from ._gluon import (
    head_group as head_group,
    multiprocessors as multiprocessors,
    strides_of as strides_of,
    tma_blocks as tma_blocks,
    tma_vector as tma_vector,
)
from ._map_blocks import has_bit as has_bit, map_blocks as map_blocks
from ._map_words import words_of_map as words_of_map
from ._mod_elements import (
    element_gradients as element_gradients,
    elements as elements,
    elements_by_distance as elements_by_distance,
)
from ._mod_evaluate import captured_totals as captured_totals
from ._pallas import (
    across_lanes as across_lanes,
    column as column,
    dot as dot,
    drawn as drawn,
    fit_block as fit_block,
    fit_chunk as fit_chunk,
    interpret_params as interpret_params,
    LANES as LANES,
    matmul_precision as matmul_precision,
    OVERFLOW as OVERFLOW,
    pad_rows as pad_rows,
    pad_segments as pad_segments,
    SAMPLE as SAMPLE,
    tanh as tanh,
    widen as widen,
    zero_tail as zero_tail,
)
from ._parts import (
    edges_of_band as edges_of_band,
    ends_of_rows as ends_of_rows,
    in_turns as in_turns,
    parts_before_end as parts_before_end,
    parts_of_block as parts_of_block,
    rows_without as rows_without,
)
from ._precision import dot_precision as dot_precision
from ._query_sums import query_sums as query_sums
from ._score_blocks import dropout_blocks as dropout_blocks, score_blocks as score_blocks
from ._sinks import sinks_gradient as sinks_gradient
from ._summaries import block_summary as block_summary, visited_ranges as visited_ranges
from ._triton_call import triton_call as triton_call
from ._triton_lists import tile_visibility as tile_visibility, visited_lists as visited_lists
from ._triton_matrices import bias_parts as bias_parts, matrix_shape as matrix_shape, sum_of_parts as sum_of_parts
from ._vector_memory import vmem_limit_bytes as vmem_limit_bytes
from ._visits import (
    band_kv_visits as band_kv_visits,
    band_q_visits as band_q_visits,
    map_kv_visits as map_kv_visits,
    map_q_visits as map_q_visits,
    segment_kv_visits as segment_kv_visits,
    segment_q_visits as segment_q_visits,
)
