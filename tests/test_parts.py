"""Which parts of which blocks the TPU's backward computes, against every single score."""

import numpy as np
import pytest

from eqx_attn._operands import Tile
from eqx_attn._parts import edges_of_band, MAX_EDGES, parts_before_end, parts_of_block


@pytest.mark.parametrize(
    "block_q, block_kv, q_seq, kv_seq, lower, upper",
    [
        (8, 8, 32, 32, None, 0),
        (8, 8, 30, 29, -8, 0),
        (8, 16, 40, 60, -5, 9),
        (12, 4, 50, 33, None, -7),
        (4, 12, 33, 90, 3, 40),
        (8, 8, 20, 64, None, 44),
        (8, 8, 8, 8, -100, 100),
    ],
)
def test_edges_of_a_band(block_q, block_kv, q_seq, kv_seq, lower, upper):
    """Each block that is visible in part is on one edge, whose parts hold all of its scores, whole ones no hidden one."""
    tile = Tile(block_q, block_kv, inner_q=4, inner_kv=4)
    edges = edges_of_band(tile, block_q, block_kv, q_seq, kv_seq, lower=lower, upper=upper)
    assert len(edges) <= MAX_EDGES
    rows, columns = -(-q_seq // block_q) * block_q, -(-kv_seq // block_kv) * block_kv
    distance = np.arange(columns)[None] - np.arange(rows)[:, None]
    seen = (np.arange(columns) < kv_seq)[None] & (lower is None or distance >= lower) & (distance <= upper)
    used = set()
    for i in range(0, rows, block_q):
        for j in range(0, columns, block_kv):
            block = seen[i : i + block_q, j : j + block_kv]
            through = [number for number, edge in enumerate(edges) if edge.low <= j - i <= edge.high]
            if not block.any() or block.all():
                continue
            (number,) = through
            used.add(number)
            left = block.copy()
            for part in edges[number].parts:
                assert not part.whole or block[part.rows, part.columns].all()
                left[part.rows, part.columns] = False
            assert not left.any()
    assert used == set(range(len(edges)))


def test_a_diagonal_of_square_blocks_has_no_hidden_part():
    (edge,) = edges_of_band(Tile(1024, 1024), 1024, 1024, 4096, 4096, upper=0)
    assert (edge.low, edge.high, len(edge.parts), sum(part.whole for part in edge.parts)) == (0, 0, 10, 6)


def test_parts_before_the_end():
    """Of 12 keys in blocks of 8, the last block has 4: its last part is cut off, and none is seen in part."""
    tile = Tile(8, 8, inner_q=4, inner_kv=4)
    assert parts_before_end(tile, 8, 8, 12) == parts_of_block(tile, 8, 8)[:2]
    assert [part.whole for part in parts_before_end(tile, 8, 8, 13)] == [True, True, False, False]
