import pytest
import torch

from isomodels.kernels.gemm_tuning import BUCKETS
from isomodels.kernels.row_linear import LEAVES, row_linear, row_linear_partial, tree_sum
from tests.kernel.battery import DTYPES, assert_same_bits, hard, relative_rms, unit_error
from tests.kernel.triton_support import (
    DEVICE,
    ON_GPU,
    assert_rows_stand_alone_on_gpu,
    assert_same_in_a_graph,
    kernels,
)

triton_row_linear = kernels("row_linear_triton").row_linear

# On both sides of every bucket of the tuning.
COUNTS = (2, 7, *(m + i for m in BUCKETS for i in (0, 1) if m < 1024), 1024)
# Qwen3-8B o and down; MiMo's down, whose leaf of 1,376 no K block divides; odd ones
REAL = [(4096, 4096), (4096, 12288), (4096, 11008)]
ODD = [(130, 8 * 33), (65, 8 * 40), (7, 8)]


@pytest.mark.parametrize(("m", "n", "k"), [(5, 40, 96), (70, 65, 8 * 9), (3, 70, 8 * 40)])
def test_a_tree_is_its_leaves_folded(m, n, k):
    x, weight = hard(m, k).to(DEVICE), hard(n, k, seed=1).to(DEVICE)
    whole = triton_row_linear(x, weight, LEAVES, torch.float32)
    for ranks in (r for r in (2, 4, 8) if r <= LEAVES):
        parts = zip(x.chunk(ranks, 1), weight.chunk(ranks, 1), strict=True)
        subtrees = [triton_row_linear(a, b, LEAVES // ranks, torch.float32) for a, b in parts]
        if DEVICE == "cuda":
            assert_same_bits(tree_sum(subtrees), whole, f"{ranks} ranks")
        # numpy's products in the interpreter depend on their shape
        assert relative_rms(tree_sum(subtrees), whole) < unit_error(torch.float32, k)
    exact = x.double() @ weight.double().T
    assert relative_rms(whole, exact) < unit_error(torch.float32, k)


@ON_GPU
@pytest.mark.parametrize(("n", "k"), REAL + ODD)
def test_rows_stand_alone(n, k):
    weight = hard(n, k, seed=1, dtype=torch.bfloat16).cuda()
    x = hard(1029, k, dtype=torch.bfloat16).cuda()
    assert_rows_stand_alone_on_gpu(lambda x: row_linear(x, weight), x, COUNTS)


@ON_GPU
@pytest.mark.parametrize("rows", [1, 16, 60, 256, 1029])
@pytest.mark.parametrize(("n", "k"), REAL + ODD)
def test_ranks_have_the_bits_of_the_whole(n, k, rows):
    x = hard(rows, k, dtype=torch.bfloat16).cuda()
    weight = hard(n, k, seed=1, dtype=torch.bfloat16).cuda()
    whole = row_linear(x, weight)
    for ranks in (r for r in (2, 4, 8) if r <= LEAVES):
        parts = zip(x.chunk(ranks, 1), weight.chunk(ranks, 1), strict=True)
        subtrees = [row_linear_partial(a, b, LEAVES // ranks) for a, b in parts]
        assert_same_bits(tree_sum(subtrees).to(x.dtype), whole, f"{ranks} ranks")


@ON_GPU
@pytest.mark.parametrize("dtype", DTYPES)
def test_accuracy_and_gradients(dtype):
    x = hard(150, 8 * 44, kind="normal", dtype=dtype).cuda().requires_grad_()
    weight = hard(70, 8 * 44, kind="normal", seed=1, dtype=dtype).cuda().requires_grad_()
    y = row_linear(x, weight)
    assert relative_rms(y, x.double() @ weight.double().T) < unit_error(dtype, 352)
    seed = hard(150, 70, kind="normal", seed=2, dtype=dtype).cuda()
    dx, dweight = torch.autograd.grad(y, (x, weight), seed)
    assert relative_rms(dx, seed.double() @ weight.double()) < unit_error(dtype, 70)
    assert relative_rms(dweight, seed.double().T @ x.double()) < unit_error(dtype, 150)


@ON_GPU
def test_same_in_a_graph():
    weight = hard(512, 1024, seed=1, dtype=torch.bfloat16).cuda()
    x = hard(64, 1024, dtype=torch.bfloat16).cuda()
    assert_same_in_a_graph(lambda x: row_linear(x, weight), x)


def test_bad_subtree():
    with pytest.raises(ValueError, match="got 3"):
        row_linear_partial(hard(2, 24), hard(2, 24), 3)
