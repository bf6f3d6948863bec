import pytest
import torch

from isomodels.kernels.grouped_linear import grouped_linear, grouped_linear_backward
from isomodels.kernels.linear import linear
from isomodels.kernels.moe_sort import moe_sort
from tests.kernel.battery import DTYPES, assert_same_bits, hard, relative_rms, unit_error
from tests.kernel.test_moe_sort import draw
from tests.kernel.triton_support import DEVICE, ON_GPU, assert_same_in_a_graph, kernels

gemm_module, backend = kernels("grouped_gemm_triton"), kernels("grouped_linear_triton")
GroupedConfig, grouped_gemm = gemm_module.GroupedConfig, gemm_module.grouped_gemm
BF16 = torch.bfloat16
gpu = ON_GPU

# Swapped, in two parts, plain
CONFIGS = [
    GroupedConfig(16, 32, 16, 2, 4, 1),
    GroupedConfig(32, 16, 16, 2, 4, subtiles=2),
    GroupedConfig(64, 32, 32, 2, 4),
]
# (T, k, E, N, K): no multiple of a tile; experts without rows; strides that bulk copies refuse
SHAPES = [(9, 2, 4, 40, 48), (21, 2, 5, 33, 32), (2, 1, 6, 7, 65)]

CASES = [*zip(SHAPES, CONFIGS, strict=True), (SHAPES[0], CONFIGS[1]), (SHAPES[1], CONFIGS[0])]


def drawn(tokens, top_k, experts, seed=0):
    """ids [T, k] that leave the last expert and one more without a row, and what sorts them."""
    ids = draw(tokens, top_k, experts - 2, seed)
    ids = (ids + (ids >= 1)).to(DEVICE)  # expert 1 has none
    if DEVICE == "cuda":
        return ids, *moe_sort(ids, experts)
    order = ids.flatten().argsort(stable=True)
    offsets = torch.zeros(experts + 1, dtype=torch.int32)
    offsets[1:] = torch.bincount(ids.flatten(), minlength=experts).cumsum(0)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
    return ids, offsets, order.int(), places.view_as(ids).int()


def expert_by_expert(rows, weight, offsets):
    """`linear` of each expert's rows [R, K], alone."""
    parts = rows.split(offsets.diff().tolist())
    return torch.cat([linear(part, one) for part, one in zip(parts, weight, strict=True)])


@pytest.mark.parametrize(("shape", "config"), CASES)
def test_products_and_gradients(shape, config):
    tokens, top_k, experts, n, k = shape
    x, weight = (hard(*s, kind="normal").to(DEVICE) for s in ((tokens, k), (experts, n, k)))
    ids, offsets, order, _ = drawn(tokens, top_k, experts)
    rows = x[order.long() // top_k]
    of_rows = weight[ids.flatten()[order.long()].long()].double()  # [R, N, K]
    exact = torch.einsum("rnk,rk->rn", of_rows, rows.double())
    bound = unit_error(torch.float32, k + n)
    assert relative_rms(grouped_gemm(rows, weight, offsets, config), exact) < bound
    grad = hard(len(rows), n, kind="normal", seed=2).to(DEVICE)
    drows = grouped_gemm(grad, weight, offsets, config, b_t=True)
    assert relative_rms(drows, torch.einsum("rnk,rn->rk", of_rows, grad.double())) < bound
    grad[0] = rows[-1] = torch.nan  # of the first expert, and of the last that has a row
    dweight = gemm_module.grouped_weight_gradient(grad, rows, offsets, experts, config)
    parts = [p.split(offsets.diff().tolist()) for p in (grad.double(), rows.double())]
    right = torch.stack([g.t() @ r for g, r in zip(*parts, strict=True)])
    assert (dweight.isnan() == right.isnan()).all()
    assert relative_rms(dweight.nan_to_num(), right.nan_to_num()) < bound


def test_operator_and_its_gradients():
    tokens, top_k, experts, n, k = 9, 3, 6, 18, 32
    x, weight = (hard(*s, kind="normal").to(DEVICE) for s in ((tokens, k), (experts, n, k)))
    ids, offsets, order, places = drawn(tokens, top_k, experts)
    rows = x[order.long() // top_k]
    y = backend.grouped_linear(x, weight, offsets, places)
    exact = torch.einsum("tsnk,tk->tsn", weight[ids.long()].double(), x.double())
    assert relative_rms(y[places.long()], exact) < unit_error(torch.float32, k)
    alone = backend.grouped_linear(rows, weight, offsets, None)
    assert relative_rms(alone, y) < unit_error(torch.float32, k)
    grad = hard(len(rows), n, kind="normal", seed=2).to(DEVICE)
    leaves = [x.double().requires_grad_(), weight.double().requires_grad_()]
    product = torch.einsum("tsnk,tk->tsn", leaves[1][ids.long()], leaves[0])
    right = torch.autograd.grad(product, leaves, grad[places.long()].double())
    found = backend.grouped_linear_backward(grad, x, weight, offsets, places, True, True)
    for one, exactly in zip(found, right, strict=True):
        assert relative_rms(one, exactly) < unit_error(torch.float32, n * top_k)
    nothing = backend.grouped_linear_backward(grad, x, weight, offsets, places, False, False)
    assert [t.numel() for t in nothing] == [0, 0]


@pytest.mark.parametrize("table", ["_FORWARD", "_INPUT_GRADIENT", "_WEIGHT_GRADIENT"])
def test_tables_end_with_any_number_of_rows(table):
    table = getattr(backend, table)
    for rows in (0, 1, 63, 10**6, 2**30):
        backend.tuning(table, BF16, rows, 1)
    assert backend.tuning(table, torch.float32, 64, 4) == gemm_module.FP32


# GLM-4.7-Flash's two projections, Qwen3.5-35B-A3B's, and shapes no tile and no bulk copy fits
REAL = [(64, 4, 3072, 2048), (64, 4, 2048, 1536), (256, 8, 1024, 2048), (256, 8, 2048, 512)]
ODD = [(5, 2, 130, 1376), (12, 3, 65, 1001), (4, 1, 7, 8)]


def operands(experts, n, k, tokens, dtype=BF16):
    x = hard(tokens, k, dtype=dtype, device=DEVICE)
    return x, hard(experts, n, k, seed=1, dtype=dtype, device=DEVICE)


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("experts", "top_k", "n", "k"), REAL + ODD)
def test_a_row_has_the_bits_of_its_experts_linear(experts, top_k, n, k, dtype):
    if dtype == torch.float32 and n * k > 10**6:
        pytest.skip("fp32 has one choice of tiles, and is slow")
    x, weight = operands(experts, n, k, 1500, dtype)
    # Few and many rows an expert: every choice of tiles
    for tokens in (1, 16, 100, 500, 1500):
        _, offsets, order, places = drawn(tokens, top_k, experts, seed=tokens)
        rows = x[order.long() // top_k]
        expected = expert_by_expert(rows, weight, offsets)
        y = grouped_linear(x[:tokens], weight, offsets, order, places)
        assert_same_bits(y, expected, f"{tokens} tokens")
        assert_same_bits(grouped_linear(rows, weight, offsets), expected, f"{tokens} rows")


@gpu
def test_crowded_and_empty_experts():
    x, weight = operands(64, 384, 512, 1000)
    for tokens, expert in ((1, 63), (40, 0), (1000, 5)):
        ids = torch.full((tokens, 1), expert, dtype=torch.int32, device="cuda")
        y = grouped_linear(x[:tokens], weight, *moe_sort(ids, 64))
        assert_same_bits(y, linear(x[:tokens], weight[expert]), f"all {tokens} on {expert}")
    none = torch.empty(0, 1, dtype=torch.int32, device="cuda")
    assert grouped_linear(x[:0], weight, *moe_sort(none, 64)).shape == (0, 384)


@gpu
@pytest.mark.parametrize("tokens", [33, 700])
def test_neighbours_and_their_experts_do_not_matter(tokens):
    x, weight = operands(16, 320, 512, tokens)
    ids, offsets, order, places = drawn(tokens, 2, 16)
    whole = grouped_linear(x, weight, offsets, order, places)[places.long()]  # [T, k, N]
    for seed in range(1, 6):
        others, *_ = drawn(tokens, 2, 16, seed)
        keep = (torch.arange(tokens) % 3 == seed % 3).cuda()
        mixed = torch.where(keep[:, None], ids, others)
        rows = torch.where(keep[:, None], x, torch.nan)  # as rows of padding may be
        sorting = moe_sort(mixed, 16)
        y = grouped_linear(rows, weight, *sorting)[sorting[2].long()]
        assert_same_bits(y[keep], whole[keep], f"others of seed {seed}")
    for row in (0, 7, tokens - 1):
        sorting = moe_sort(ids[row : row + 1], 16)
        alone = grouped_linear(x[row : row + 1], weight, *sorting)[sorting[2].long()]
        assert_same_bits(alone, whole[row : row + 1], f"row {row} alone")


TILES = sorted(
    {config for table in (backend._FORWARD, backend._INPUT_GRADIENT) for config in table.values()}
)


@gpu
@pytest.mark.parametrize("config", TILES)
def test_tiles_move_no_bit(config):
    # N and the last block of K are cut
    for k in (512 + 40, 512):
        x, weight = operands(8, 712, k, 600)
        _, offsets, order, _ = drawn(600, 2, 8)
        rows = x[order.long() // 2]
        expected = expert_by_expert(rows, weight, offsets)
        assert_same_bits(grouped_gemm(rows, weight, offsets, config), expected, f"K = {k}")


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gathered", [True, False])
@pytest.mark.parametrize(
    ("tokens", "experts", "n", "k"), [(70, 5, 130, 200), (33, 4, 65, 101), (1500, 8, 768, 512)]
)
def test_gradients(tokens, experts, n, k, gathered, dtype):
    _, offsets, order, places = drawn(tokens, 2, experts)
    sorting = (order, places) if gathered else ()
    shapes = [(tokens if gathered else 2 * tokens, k), (experts, n, k), (2 * tokens, n)]
    x, weight, seed = (
        hard(*s, kind="normal", seed=i, dtype=dtype).cuda() for i, s in enumerate(shapes)
    )
    leaves = x.requires_grad_(), weight.requires_grad_()
    y = grouped_linear(x, weight, offsets, *sorting)
    first, second = (torch.autograd.grad(y, leaves, seed, retain_graph=True) for _ in range(2))
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    rows = exact[0][order.long() // 2] if gathered else exact[0]
    parts = [
        part @ one.t()
        for part, one in zip(rows.split(offsets.diff().tolist()), exact[1], strict=True)
    ]
    right = torch.autograd.grad(torch.cat(parts), exact, seed.double())
    for one, two, exactly in zip(first, second, right, strict=True):
        assert_same_bits(one, two, "second run")
        # slots are rounded before they are added
        assert relative_rms(one, exactly) < 2 * unit_error(dtype, max(tokens, n))
    assert (first[1][-1] == 0).all()  # an expert without rows


@gpu
def test_a_row_that_is_not_finite_spoils_the_gradient_of_its_own_expert_alone():
    _, offsets, order, places = drawn(300, 2, 8)
    x, weight = operands(8, 256, 128, 300)
    grad = hard(600, 256, dtype=BF16, device="cuda")
    rows = x[order.long() // 2]
    bounds = offsets.tolist()
    clean = grouped_linear_backward(grad, rows, weight, offsets, None, None, False, True)[1]
    spoilt = 2  # neither the first nor the last with rows
    for tensor in (grad, rows):
        tensor[bounds[spoilt] : bounds[spoilt + 1]] = torch.nan
    dweight = grouped_linear_backward(grad, rows, weight, offsets, None, None, False, True)[1]
    others = [e for e in range(8) if e != spoilt]
    assert_same_bits(dweight[others], clean[others])
    assert dweight[spoilt].isnan().all()
    assert places.shape == (300, 2)


@gpu
@pytest.mark.parametrize("tokens", [8, 64, 300])
def test_same_in_a_graph(tokens):
    x, weight = operands(16, 512, 1024, tokens)
    ids, *_ = drawn(tokens, 4, 16)

    def op(x, ids):
        sorting = moe_sort(ids, 16)
        return grouped_linear(x, weight, *sorting)[sorting[2].long()].flatten(1)

    # Replayed on other ids: no size of an expert is baked into the graph
    assert_same_in_a_graph(op, x, ids)


@gpu
def test_opcheck():
    _, offsets, order, places = drawn(9, 2, 4)
    x = hard(9, 16, dtype=BF16).cuda().requires_grad_()
    weight = hard(4, 8, 16, dtype=BF16).cuda().requires_grad_()
    torch.library.opcheck(grouped_linear, (x, weight, offsets, order, places))
