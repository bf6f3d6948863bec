"""Triton backend of `isomodels::token_logprobs`, and of every backward of the head.

The block sums of `isomodels.kernels.logprob_fold_triton` are taken of the accumulators of the
product, so no [T, V] tensor of logits is stored.
"""

# Arguments of kernels have Triton's own types.
# mypy: disable-error-code="no-untyped-def"

import functools
import itertools

import torch
import triton
import triton.language as tl
from torch import Tensor

from isomodels.kernels.common_triton import processors
from isomodels.kernels.gemm_triton import TRITON_DTYPES, Config, bulk, descriptor, load_block, place
from isomodels.kernels.linear_triton import input_gradient, tuning, weight_gradient
from isomodels.kernels.logprob_fold_triton import (
    BLOCK,
    LOG2_BLOCK,
    block_sums,
    cuts,
    exp,
    finite,
    fold_blocks,
    scaled,
)

_FP32_VOCAB = Config(32, 128, 32, 2, 4)
_CHUNK = 16384  # columns of the vocabulary whose gradient exists at a time
_KEPT_BLOCKS, _KEPT_WARPS = 32, 8  # tuning: of a program that makes a gradient of what was kept


@triton.jit
def _fold_kernel(
    top_ptr, sum_ptr, chosen_ptr, out_ptr, normalizer_ptr, blocks, leaf_blocks, LOG2: tl.constexpr
):
    row = tl.program_id(0)
    row_top, log_sum = fold_blocks(top_ptr, sum_ptr, row, blocks, leaf_blocks, LOG2)
    one = tl.arange(0, 1)
    chosen = tl.load(chosen_ptr + row + one)
    tl.store(out_ptr + row + one, (chosen - row_top) - log_sum)
    tl.store(normalizer_ptr + row * 2 + one, row_top + tl.zeros((1,), tl.float32))
    tl.store(normalizer_ptr + row * 2 + 1 + one, log_sum)


@triton.jit(do_not_specialize=["M", "N", "steps", "blocks", "first_column", "kept"])
def _vocab_gemm(
    a_desc, b_desc, c_desc, top_ptr, sum_ptr, chosen_ptr, target_ptr, normalizer_ptr, grad_ptr,
    M, N, steps, blocks, first_column, kept, temperature,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    SUBTILES: tl.constexpr, SCALE: tl.constexpr, GRAD: tl.constexpr, KEEP: tl.constexpr,
    OUT: tl.constexpr,
):  # fmt: skip
    """Logits tile by tile; of each, only block sums and targets, or the gradient, are stored.

    KEEP: of columns before `kept`, the exponentials above the maximum of their block too.
    """
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    programs = tl.num_programs(0)
    tile = tl.program_id(0) - programs
    mine = tl.cdiv(tiles_m * tiles_n - tl.program_id(0), programs)
    step, m, n = steps - 1, 0, 0
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for _ in range(mine * steps):
        step = tl.where(step == steps - 1, 0, step + 1)
        if step == 0:
            tile += programs
            tile_m, tile_n = place(tile, tiles_m, tiles_n, GROUP)
            m, n = tile_m * BLOCK_M, tile_n * BLOCK_N
        a = load_block(a_desc, 0, m, step * BLOCK_K, 1, BLOCK_M, BLOCK_K, False)
        b = load_block(b_desc, 0, n, step * BLOCK_K, 1, BLOCK_N, BLOCK_K, False)
        acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
        if step == steps - 1:
            row, column = m + tl.arange(0, BLOCK_M), n + tl.arange(0, BLOCK_N)
            target = tl.load(target_ptr + row, mask=row < M, other=-1) - first_column
            if GRAD:
                _store_gradient(
                    acc, c_desc, normalizer_ptr, grad_ptr, target, row, column, m, n, M,
                    temperature, BLOCK_M, BLOCK_N, SUBTILES, SCALE, OUT,
                )  # fmt: skip
            else:
                _store_sums(
                    acc, c_desc, top_ptr, sum_ptr, chosen_ptr, target, row, column, m, n, M, N,
                    blocks, kept, temperature, BLOCK_M, BLOCK_N, SUBTILES, SCALE, KEEP, OUT,
                )  # fmt: skip
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)


@triton.jit
def _store_sums(
    acc, c_desc, top_ptr, sum_ptr, chosen_ptr, target, row, column, m, n, M, N, blocks, kept,
    temperature, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SUBTILES: tl.constexpr,
    SCALE: tl.constexpr, KEEP: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    x = scaled(acc, temperature, SCALE)
    x = tl.where((column < N)[None, :], x, -float("inf"))
    here = (target >= n) & (target < min(n + BLOCK_N, N))
    if tl.max(here.to(tl.int32), axis=0) == 1:
        # A maximum of one value: adding zeros instead would turn -0 into +0.
        chosen = tl.max(tl.where(column[None, :] == target[:, None], x, -float("inf")), axis=1)
        tl.store(chosen_ptr + row, chosen, mask=here & (row < M))
    PARTS: tl.constexpr = BLOCK_N // 2**LOG2_BLOCK
    cut = tl.reshape(x, (BLOCK_M * PARTS, 2**LOG2_BLOCK))
    top, total = block_sums(cut, BLOCK_M * PARTS)
    if KEEP and n < kept:
        tile = tl.reshape(exp(cut - finite(top)[:, None]), (BLOCK_M, BLOCK_N))
        _store_tile(tile, c_desc, m, n, BLOCK_M, BLOCK_N, SUBTILES, OUT)
    block = n // 2**LOG2_BLOCK + tl.arange(0, PARTS)
    at = row.to(tl.int64)[:, None] * blocks + block[None, :]
    mask = (row < M)[:, None] & (block < blocks)[None, :]
    tl.store(top_ptr + at, tl.reshape(top, (BLOCK_M, PARTS)), mask=mask)
    tl.store(sum_ptr + at, tl.reshape(total, (BLOCK_M, PARTS)), mask=mask)


@triton.jit
def _store_gradient(
    acc, c_desc, normalizer_ptr, grad_ptr, target, row, column, m, n, M, temperature,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SUBTILES: tl.constexpr, SCALE: tl.constexpr,
    OUT: tl.constexpr,
):  # fmt: skip
    row_top = tl.load(normalizer_ptr + row * 2, mask=row < M, other=0.0)
    log_sum = tl.load(normalizer_ptr + row * 2 + 1, mask=row < M, other=0.0)
    grad = tl.load(grad_ptr + row, mask=row < M, other=0.0) / temperature
    x = scaled(acc, temperature, SCALE)
    hit = tl.where(column[None, :] == target[:, None], 1.0, 0.0)
    dlogits = (hit - exp((x - row_top[:, None]) - log_sum[:, None])) * grad[:, None]
    _store_tile(dlogits, c_desc, m, n, BLOCK_M, BLOCK_N, SUBTILES, OUT)


@triton.jit
def _store_tile(
    tile, c_desc, m, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SUBTILES: tl.constexpr,
    OUT: tl.constexpr,
):  # fmt: skip
    if SUBTILES == 1:
        c_desc.store([m, n], tile.to(OUT))
    else:
        halves = tl.permute(tl.reshape(tile, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1))
        left, right = tl.split(halves)
        c_desc.store([m, n], left.to(OUT))
        c_desc.store([m, n + BLOCK_N // 2], right.to(OUT))


@triton.jit(do_not_specialize=["first_block", "blocks"])
def _kept_gradient(
    kept_ptr, top_ptr, normalizer_ptr, grad_ptr, target_ptr, out_ptr, first_block, width, blocks,
    kept_stride, out_stride, temperature, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Gradient of the logits of `width` columns from a block on, made of what was kept."""
    row = tl.program_id(0).to(tl.int64)
    first = first_block * 2**LOG2_BLOCK
    part = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    at = part[:, None] * 2**LOG2_BLOCK + tl.arange(0, 2**LOG2_BLOCK)[None, :]
    inside = at < width
    row_top = tl.load(normalizer_ptr + row * 2)
    log_sum = tl.load(normalizer_ptr + row * 2 + 1)
    grad = tl.load(grad_ptr + row) / temperature
    target = tl.load(target_ptr + row) - first
    block = first_block + part
    top = tl.load(top_ptr + row * blocks + block, mask=block < blocks, other=-float("inf"))
    kept = tl.load(kept_ptr + row * kept_stride + first + at, mask=inside, other=0.0)
    p = kept.to(tl.float32) * exp((top - row_top) - log_sum)[:, None]
    dlogits = (tl.where(at == target, 1.0, 0.0) - p) * grad
    tl.store(out_ptr + row * out_stride + at, dlogits.to(out_ptr.dtype.element_ty), mask=inside)


def _launch(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    *,
    sums: tuple[Tensor, Tensor, Tensor] | None = None,
    backward: tuple[Tensor, Tensor, Tensor] | None = None,
    kept: Tensor | None = None,
    first_column: int = 0,
) -> None:
    """Run `_vocab_gemm` for block sums (top, sum, chosen) or for (dlogits, normalizer, grad).

    `kept` [T, columns]: filled, beside the block sums, with the exponentials of the first columns.
    """
    (rows, k), n = hidden.shape, weight.shape[0]
    fp32 = hidden.dtype == torch.float32
    kind = "vocab gradient" if backward else "vocab" if kept is None else "vocab kept"
    config = _FP32_VOCAB if fp32 else tuning(kind, hidden, rows, n, k)
    block_m, block_n, block_k = config.block_m, config.block_n, config.block_k
    top, total, chosen = sums or (None, None, None)
    stored, normalizer, grad = backward or (kept, None, None)
    c_block = [block_m, block_n // config.subtiles]
    c_desc = None if stored is None else descriptor(stored, c_block)
    tiles = triton.cdiv(rows, block_m) * triton.cdiv(n, block_n)
    _vocab_gemm[(min(tiles, processors(hidden)),)](
        descriptor(bulk(hidden), [block_m, block_k]), descriptor(bulk(weight), [block_n, block_k]),
        c_desc, top, total, chosen, targets.contiguous(), normalizer, grad,
        rows, n, triton.cdiv(k, block_k), triton.cdiv(n, BLOCK), first_column,
        0 if kept is None else kept.shape[1], temperature,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, GROUP=8, SUBTILES=config.subtiles,
        SCALE=temperature != 1.0, GRAD=backward is not None, KEEP=kept is not None,
        OUT=TRITON_DTYPES[hidden.dtype],
        num_warps=config.warps, num_stages=config.stages, enable_fp_fusion=False,
    )  # fmt: skip


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    keep: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """hidden [T, H], weight [V, H], targets [T] -> (logprobs [T], (maximum, log sum) [T, 2]).

    `keep`, filled for a backward: exponentials above the maximum of their block, of the first
    columns, [T, columns] in the dtype of `hidden`, and the maxima [T, blocks].
    """
    rows, vocab_size = len(hidden), weight.shape[0]
    blocks, leaf_blocks, log2 = cuts(vocab_size)
    new = functools.partial(torch.empty, dtype=torch.float32, device=hidden.device)
    kept, top = keep or (None, new(rows, blocks))
    if kept is not None and not kept.shape[1]:
        kept = None
    total = new(rows, blocks)
    # A target that no column has, an invalid one, gives NaN.
    chosen = new(rows).fill_(torch.nan)
    logprobs, normalizer = new(rows), new(rows, 2)
    if rows:
        _launch(hidden, weight, targets, temperature, sums=(top, total, chosen), kept=kept)
        _fold_kernel[(rows,)](
            top, total, chosen, logprobs, normalizer, blocks, leaf_blocks,
            LOG2=log2, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return logprobs, normalizer


def token_logprobs_backward(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    normalizer: Tensor,
    temperature: float,
    kept: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """grad [T] fp32 -> (dhidden [T, H], dweight [V, H]).

    The gradient of the logits exists for one part of the vocabulary at a time, rounded to the dtype
    of `hidden` for the two products that use it. It is made of what the forward kept, or of logits
    that are computed again.
    """
    dhidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    dweight = torch.empty_like(weight, memory_format=torch.contiguous_format)
    if not len(hidden):
        return dhidden.to(hidden.dtype), dweight.zero_()
    grad, hidden, vocab_size = grad.contiguous(), hidden.contiguous(), len(weight)
    columns = 0 if kept is None else min(kept[0].shape[1], vocab_size)
    bounds = [*range(0, columns, _CHUNK), *range(columns, vocab_size, _CHUNK), vocab_size]
    for first, end in itertools.pairwise(bounds):
        part = weight[first:end]
        dlogits = bulk(torch.empty(len(hidden), len(part), dtype=hidden.dtype, device=grad.device))
        if kept is not None and first < columns:
            _gradient_of_kept(grad, targets, normalizer, temperature, kept, dlogits, first)
        else:
            _launch(
                hidden, part, targets, temperature,
                backward=(dlogits, normalizer, grad), first_column=first,
            )  # fmt: skip
        input_gradient(dlogits, part, add_to=dhidden)
        weight_gradient(dlogits, hidden, out=dweight[first:end])
        del dlogits  # or two would exist while the next is made
    return dhidden.to(hidden.dtype), dweight


def _gradient_of_kept(
    grad: Tensor, targets: Tensor, normalizer: Tensor, temperature: float,
    kept: tuple[Tensor, Tensor], dlogits: Tensor, first: int,
) -> None:  # fmt: skip
    """Fill dlogits [T, columns], those from `first` on."""
    exponentials, tops = kept
    rows, width = dlogits.shape
    _kept_gradient[(rows, triton.cdiv(width, BLOCK * _KEPT_BLOCKS))](
        exponentials, tops, normalizer, grad, targets.contiguous(), dlogits, first // BLOCK, width,
        tops.shape[1], exponentials.stride(0), dlogits.stride(0), temperature,
        BLOCKS=_KEPT_BLOCKS, num_warps=_KEPT_WARPS,
    )  # fmt: skip


def logits_backward(grad: Tensor, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """grad [T, V] fp32 of the logits -> (dhidden [T, H], dweight [V, H])."""
    dhidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    dweight = torch.empty_like(weight, memory_format=torch.contiguous_format)
    for first in range(0, weight.shape[0], _CHUNK):
        part = slice(first, first + _CHUNK)
        dlogits = grad[:, part].to(hidden.dtype)
        input_gradient(dlogits, weight[part], add_to=dhidden)
        weight_gradient(dlogits, hidden, out=dweight[part])
    return dhidden.to(hidden.dtype), dweight
