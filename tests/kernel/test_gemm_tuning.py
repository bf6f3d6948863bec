"""The tables of tiles: well-formed, and on a GPU every tile of them gives the same bits."""

import pytest
import torch

from isomodels.kernels.gemm_tuned import TUNED
from isomodels.kernels.gemm_tuning import BUCKETS, DEFAULTS, LARGE, bucket, values
from isomodels.kernels.row_linear import LEAVES
from tests.kernel.battery import assert_same_bits, hard

FIELDS = (
    "block_m", "block_n", "block_k", "stages", "warps",
    "swap", "subtiles", "occupancy", "beside", "parts", "once",
)  # fmt: skip
FORWARD = ("nt", "tree", "head")
TILES = sorted(
    {(kind, v) for (kind, *_), v in TUNED.items()}
    | {(kind, v) for kind in FORWARD for v in DEFAULTS[kind].values()}
)


@pytest.mark.parametrize("m", [1, 16, 17, 96, 97, 2048, 2049, 10**6])
def test_bucket(m):
    assert bucket(m) == min((b for b in BUCKETS if b >= m), default=LARGE)


def test_tuned_before_default():
    (kind, m, n, k), tile = next(iter(TUNED.items()))
    assert values(kind, m, n, k) == tile
    assert values(kind, m, n + 1, k) == values(kind, m - 1, n + 1, k)
    assert values("nt", LARGE, 3, 3) == DEFAULTS["nt"][LARGE]


def test_keys():
    assert {kind for kind, *_ in TUNED} <= set(DEFAULTS)
    assert {m for _, m, *_ in TUNED} <= {*BUCKETS, LARGE}
    assert all(LARGE in limits for limits in DEFAULTS.values())


@pytest.mark.parametrize(("kind", "tile"), TILES)
def test_tile_is_one_that_the_kernels_have(kind, tile):
    given = dict(zip(FIELDS, tile, strict=False))
    assert len(tile) <= len(FIELDS)
    # Instructions of one kind only: a result of 64 rows or more, of the weight's where swapped.
    assert (given["block_n"] if given.get("swap") else given["block_m"]) >= 64
    parts = given.get("parts", 1)
    assert parts <= (LEAVES if kind == "tree" else 1)
    if given.get("beside"):
        assert given.get("once")
        assert kind != "tree" or parts == LEAVES


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "tile"), TILES)
def test_tile_moves_no_bit(kind, tile):
    from isomodels.kernels.gemm_triton import Config, gemm

    # K: the last block of every leaf is cut; N and M: tiles at both ends are
    x = hard(300, LEAVES * 536, dtype=torch.bfloat16).cuda()
    weight = hard(712, LEAVES * 536, seed=1, dtype=torch.bfloat16).cuda()
    leaves = LEAVES if kind == "tree" else 1
    out_dtype = torch.float32 if kind == "head" else torch.bfloat16
    reference = gemm(x, weight, Config(64, 64, 64, 3, 4), out_dtype=out_dtype, leaves=leaves)
    for rows in (300, 77, 1):
        y = gemm(x[:rows], weight, Config(*tile), out_dtype=out_dtype, leaves=leaves)
        assert_same_bits(y, reference[:rows], f"{rows} rows")
