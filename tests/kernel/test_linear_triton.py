import pytest
import torch
import torch.nn.functional as F

from isomodels.kernels.gemm_tuning import BUCKETS
from isomodels.kernels.linear import linear
from tests.kernel.battery import (
    DTYPES,
    assert_same_bits,
    hard,
    layouts,
    odd_storage,
    relative_rms,
    unit_error,
)
from tests.kernel.triton_support import (
    DEVICE,
    ON_GPU,
    assert_rows_stand_alone_on_gpu,
    assert_same_in_a_graph,
    kernels,
)

gemm_module = kernels("gemm_triton")
Config, gemm = gemm_module.Config, gemm_module.gemm

# Every way through the kernels: several tiles of both axes, swapped, written in two parts; then
# two accumulators side by side, leaves shared by programs, one tile a program.
CONFIGS = [Config(16, 32, 32, 2, 4), Config(32, 16, 16, 2, 4, 1), Config(64, 32, 64, 2, 4, 0, 2)]
BESIDE = [
    Config(16, 32, 32, 2, 4, beside=16, parts=8, once=1),
    Config(32, 16, 16, 2, 4, 1, beside=32, parts=8, once=1),
    Config(64, 32, 64, 2, 4, 0, 2, beside=16, parts=8, once=1),
]
PARTS = [Config(16, 32, 32, 2, 4, parts=2), Config(32, 16, 16, 2, 4, 1, parts=8)]
# M, N, K, leaves: ragged tiles; leaves that end inside a block; strides that bulk copies refuse
SHAPES = [
    (5, 40, 96, 1),
    (70, 65, 100, 1),
    (17, 9, 65, 1),
    (33, 65, 176, 8),
    (20, 48, 80, 4),
    (9, 33, 88, 8),
]
# On both sides of every bucket of the tuning.
COUNTS = (2, 7, *(m + i for m in BUCKETS for i in (0, 1) if m < 1024), 100, 200, 1024)
# Qwen3-8B qkv, o and gate-up; Qwen3.5-35B-A3B's; and shapes no bulk copy or tile fits
REAL = [(6144, 4096), (4096, 4096), (24576, 4096), (9216, 2048), (512, 2048)]
ODD = [(130, 1376), (1000, 4100), (65, 1001), (7, 8)]


CASES = [(s, c) for s in SHAPES for c in CONFIGS] + [
    (s, c) for s in SHAPES[1:5:3] + SHAPES[-1:] for c in BESIDE + PARTS
]


@pytest.mark.parametrize(("shape", "config"), CASES)
def test_product(shape, config):
    m, n, k, leaves = shape
    a, b = hard(m, k, kind="normal").to(DEVICE), hard(n, k, kind="normal", seed=1).to(DEVICE)
    bias = hard(n, kind="normal", seed=2).to(DEVICE)
    exact = a.double() @ b.double().T
    y = gemm(a, b, config, out_dtype=torch.float32, leaves=leaves)
    assert relative_rms(y, exact) < unit_error(torch.float32, k)
    if leaves > 1:
        return  # a product with a bias has one leaf
    y = gemm(a, b, config, out_dtype=torch.float32, bias=bias)
    assert relative_rms(y, exact + bias) < unit_error(torch.float32, k)


@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[2], BESIDE[0], BESIDE[2]])
def test_transposed_operands_and_added_results(config):
    a, b = hard(70, 50, kind="normal").to(DEVICE), hard(40, 50, kind="normal", seed=1).to(DEVICE)
    exact = a.double() @ b.double().T
    at, bt = a.t().contiguous(), b.t().contiguous()
    y = gemm(at, bt, config, out_dtype=torch.float32, a_t=True, b_t=True)
    assert relative_rms(y, exact) < unit_error(torch.float32, 50)
    out = torch.ones(70, 40, device=DEVICE)
    assert gemm(a, bt, config, out_dtype=torch.float32, b_t=True, out=out, add=True) is out
    assert relative_rms(out, exact + 1) < unit_error(torch.float32, 50)


def test_two_accumulators_hold_no_waiting_sums():
    a = torch.ones(4, 64, device=DEVICE)
    with pytest.raises(ValueError, match="beside"):
        gemm(a, a, BESIDE[0]._replace(parts=2), out_dtype=torch.float32, leaves=4)


@pytest.mark.parametrize("given", ["bias", "out", "a_t"])
def test_several_leaves_take_no_more(given):
    a = torch.ones(8, 8, device=DEVICE)
    given = {given: True if given == "a_t" else a}
    with pytest.raises(ValueError, match="several leaves"):
        gemm(a, a, PARTS[0], out_dtype=torch.float32, leaves=4, **given)


@pytest.mark.parametrize("config", [CONFIGS[0], BESIDE[0], PARTS[0]])
def test_a_block_at_the_end_of_a_leaf_reads_zeros(config):
    a, b = torch.ones(3, 8 * 24, device=DEVICE), torch.ones(5, 8 * 24, device=DEVICE)
    a[:, 24:] = torch.nan  # the second leaf and on
    one_leaf = gemm(a[:, :24], b[:, :24], config, out_dtype=torch.float32)
    assert_same_bits(one_leaf, torch.full_like(one_leaf, 24.0))
    a[:, 24:] = 0.0
    tree = gemm(a, b, config, out_dtype=torch.float32, leaves=8)
    assert_same_bits(tree, one_leaf)


def test_no_rows_and_no_columns():
    x, w = torch.ones(0, 16, device=DEVICE), torch.ones(5, 16, device=DEVICE)
    assert gemm(x, w, CONFIGS[0], out_dtype=torch.float32).shape == (0, 5)
    y = gemm(w[:, :0], w[:, :0], CONFIGS[0], out_dtype=torch.float32)
    assert_same_bits(y, torch.zeros(5, 5, device=DEVICE))


@ON_GPU
@pytest.mark.parametrize(("n", "k"), REAL + ODD)
def test_rows_stand_alone(n, k):
    weight = hard(n, k, seed=1, dtype=torch.bfloat16).cuda()
    bias = hard(n, seed=2, dtype=torch.bfloat16).cuda()
    x = hard(1029, k, dtype=torch.bfloat16).cuda()
    whole = assert_rows_stand_alone_on_gpu(lambda x: linear(x, weight, bias), x, COUNTS)
    for count in (1, 8, 60, 250):  # large products with other tiles: bits of the same rows
        assert_same_bits(linear(x[:count], weight, bias), whole[:count], f"M = {count}")


@ON_GPU
@pytest.mark.parametrize("rows", [1, 16, 60, 256, 1029])
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (24576, 4096), (1000, 1376)])
def test_a_column_shard_has_the_bits_of_the_whole(n, k, rows):
    weight = hard(n, k, seed=1, dtype=torch.bfloat16).cuda()
    x = hard(rows, k, dtype=torch.bfloat16).cuda()
    whole = linear(x, weight)
    for shards in (2, 4, 8):
        parts = [linear(x, part) for part in weight.chunk(shards)]
        assert_same_bits(torch.cat(parts, 1), whole, f"{shards} shards")


# One of each form; test_gemm_tuning.py takes all of the tables.
TILES = [
    Config(128, 256, 64, 3, 8, subtiles=2),
    Config(64, 64, 64, 4, 4, occupancy=2),
    Config(16, 64, 64, 3, 4, 1),
    Config(256, 64, 64, 4, 4, 1, once=1),
    Config(128, 128, 64, 4, 8, subtiles=2, beside=64, once=1),
    Config(32, 128, 64, 4, 4, 1, beside=64, once=1),
]


@ON_GPU
@pytest.mark.parametrize("leaves", [1, 4])
@pytest.mark.parametrize("config", TILES)
def test_tiles_move_no_bit(config, leaves):
    # K: the last block of each leaf is cut
    x, w = (hard(300, 4 * 1080, seed=i, dtype=torch.bfloat16).cuda() for i in range(2))
    tile = Config(128, 128, 64, 3, 8)
    reference = gemm(x, w, tile, out_dtype=torch.float32, leaves=leaves)
    for parts in (1, 4) if leaves > 1 else (1,):
        if config.once and parts < leaves:
            continue  # not a form of its own
        tile = config._replace(parts=parts)
        for rows in (300, 77):
            y = gemm(x[:rows], w, tile, out_dtype=torch.float32, leaves=leaves)
            assert_same_bits(y, reference[:rows], f"{parts} parts, {rows} rows")


@ON_GPU
@pytest.mark.parametrize("dtype", DTYPES)
def test_storage_does_not_matter(dtype):
    x, weight = hard(37, 200, dtype=dtype).cuda(), hard(100, 200, seed=1, dtype=dtype).cuda()
    whole = linear(x, weight)
    for name, same in layouts(weight.cpu()).items():
        assert_same_bits(linear(x, same.cuda()), whole, name)
    for name, same in layouts(x.cpu()).items():
        assert_same_bits(linear(same.cuda(), weight), whole, name)
    flat = torch.empty(100 * 200 + 1, dtype=dtype, device="cuda")
    view = flat[1:].view(100, 200).copy_(weight)
    assert_same_bits(linear(x, view), whole, "odd offset")
    assert odd_storage(weight.cpu()).storage_offset() == 1


@ON_GPU
def test_fp32_rows_stand_alone():
    weight = hard(200, 1000, seed=1).cuda()
    assert_rows_stand_alone_on_gpu(lambda x: linear(x, weight), hard(300, 1000).cuda(), COUNTS)


@ON_GPU
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [8, 1001, 4096, 12288])
def test_accuracy(k, dtype):
    x = hard(150, k, kind="normal", dtype=dtype).cuda()
    weight = hard(70, k, kind="normal", seed=1, dtype=dtype).cuda()
    exact = F.linear(x.double(), weight.double())
    assert relative_rms(linear(x, weight), exact) < unit_error(dtype, k)


@ON_GPU
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("t", "n", "k"), [(70, 130, 200), (33, 65, 101), (1024, 768, 512)])
def test_gradients(t, n, k, dtype):
    shapes = [(t, k), (n, k), (n,)]
    x, weight, bias = (
        hard(*s, kind="normal", seed=i, dtype=dtype).cuda().requires_grad_()
        for i, s in enumerate(shapes)
    )
    seed = hard(t, n, kind="normal", seed=9, dtype=dtype).cuda()
    first = torch.autograd.grad(linear(x, weight, bias), (x, weight, bias), seed)
    second = torch.autograd.grad(linear(x, weight, bias), (x, weight, bias), seed)
    exact = seed.double() @ weight.double(), seed.double().T @ x.double(), seed.double().sum(0)
    for one, two, right in zip(first, second, exact, strict=True):
        assert_same_bits(one, two, "second run")
        assert relative_rms(one, right) < unit_error(dtype, max(t, n))


@ON_GPU
@pytest.mark.parametrize("rows", [8, 64, 300])
def test_same_in_a_graph(rows):
    weight = hard(512, 1024, seed=1, dtype=torch.bfloat16).cuda()
    assert_same_in_a_graph(
        lambda x: linear(x, weight), hard(rows, 1024, dtype=torch.bfloat16).cuda()
    )


@ON_GPU
def test_opcheck():
    x, w, b = (
        hard(*s, dtype=torch.bfloat16).cuda().requires_grad_() for s in ((3, 8), (5, 8), (5,))
    )
    torch.library.opcheck(linear, (x, w, b))
