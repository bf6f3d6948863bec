"""Triton backend of `isomodels::log_normalize` and `isomodels::token_logprobs`.

Both read the vocabulary once, in blocks of 128 columns: each block leaves its maximum and the sum
of exponentials above that maximum. The blocks of each of 8 leaves, and then the leaves, are brought
to their common maximum and added, neighbours first. `block_sums` and `fold_blocks` are the one
definition of this that both operations run, the first on logits in memory, the second on the
accumulators of the product, so no [T, V] tensor is stored.
"""

# Arguments of kernels have Triton's own types.
# mypy: disable-error-code="no-untyped-def"

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from isomodels.kernels.common_triton import log2_ceil, pairwise_sum, processors, rows_of
from isomodels.kernels.gemm_triton import TRITON_DTYPES, Config, bulk, descriptor, load_block, place
from isomodels.kernels.linear_triton import input_gradient, linear, tuning, weight_gradient

BLOCK, LEAVES = 128, 8
_LOG2_BLOCK, _LOG2_LEAVES = tl.constexpr(7), tl.constexpr(3)
_FP32_VOCAB = Config(32, 128, 32, 2, 4)
# Of a program that normalises a part of a row; so few registers let three run side by side.
_PART_BLOCKS, _PART_WARPS, _PART_REGISTERS = 64, 8, 80
_CHUNK = 16384  # columns of the vocabulary whose gradient exists at a time


@triton.jit
def _finite(top):
    """A maximum that may be subtracted: a block of padding has -inf."""
    return tl.where(top == -float("inf"), 0.0, top)


@triton.jit
def block_sums(x, ROWS: tl.constexpr):
    """[ROWS, 128] -> maximum and sum of exponentials above it, [ROWS] each; -inf is padding."""
    top = tl.max(x, axis=1)
    return top, pairwise_sum(tl.exp(x - _finite(top)[:, None]), ROWS, _LOG2_BLOCK)


@triton.jit
def fold_blocks(top_ptr, sum_ptr, row, blocks, leaf_blocks, LOG2: tl.constexpr):
    """The blocks of a row -> (row maximum, log of the sum of exponentials above it)."""
    leaf, block = tl.arange(0, 2**_LOG2_LEAVES), tl.arange(0, 2**LOG2)
    index = leaf[:, None] * leaf_blocks + block[None, :]
    mask = (block < leaf_blocks)[None, :] & (index < blocks)
    at = row.to(tl.int64) * blocks + index
    # Past the first-level cache, which does not see what other multiprocessors wrote.
    tops = tl.load(top_ptr + at, mask=mask, other=-float("inf"), cache_modifier=".cg")
    sums = tl.load(sum_ptr + at, mask=mask, other=0.0, cache_modifier=".cg")
    leaf_top = tl.max(tops, axis=1)
    leaf_sum = pairwise_sum(sums * tl.exp(tops - _finite(leaf_top)[:, None]), 2**_LOG2_LEAVES, LOG2)
    row_top = tl.max(leaf_top, axis=0)
    scaled = leaf_sum * tl.exp(leaf_top - _finite(row_top))
    total = pairwise_sum(tl.reshape(scaled, (1, 2**_LOG2_LEAVES)), 1, _LOG2_LEAVES)
    return row_top, tl.log(total)


@triton.jit
def _scaled(x, temperature, SCALE: tl.constexpr):
    return tl.div_rn(x, temperature) if SCALE else x


@triton.jit(do_not_specialize=["parts"])
def _normalize_kernel(
    x_ptr, top_ptr, sum_ptr, out_ptr, normalizer_ptr, counter_ptr, vocab_size, blocks, leaf_blocks,
    parts, stride, temperature,
    SCALE: tl.constexpr, LOG2: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """`BLOCKS` blocks of one row stay in registers until the row's other programs have theirs.

    The program that comes last folds the blocks of the row; the others wait for it. A program takes
    its place from a counter, not from its number: while the first row in progress has places to
    take, no program has one of a later row. So nobody waits for good where `parts` programs fit on
    the device, whatever else runs there.
    """
    place = tl.atomic_add(counter_ptr, 1, sem="relaxed")
    row = (place // parts).to(tl.int64)
    block = (place % parts) * BLOCKS + tl.arange(0, BLOCKS)
    column = block[:, None] * 2**_LOG2_BLOCK + tl.arange(0, 2**_LOG2_BLOCK)[None, :]
    inside = column < vocab_size
    x = tl.load(x_ptr + row * stride + column, mask=inside, other=0.0)
    x = tl.where(inside, _scaled(x, temperature, SCALE), -float("inf"))
    top, total = block_sums(x, BLOCKS)
    tl.store(top_ptr + row * blocks + block, top, mask=block < blocks)
    tl.store(sum_ptr + row * blocks + block, total, mask=block < blocks)
    tl.debug_barrier()  # all threads have stored before one of them says so
    done_ptr = counter_ptr + 1 + 2 * row
    if tl.atomic_add(done_ptr, 1, sem="acq_rel") == parts - 1:
        row_top, log_sum = fold_blocks(top_ptr, sum_ptr, row, blocks, leaf_blocks, LOG2)
        one = tl.arange(0, 1)
        tl.store(normalizer_ptr + row * 2 + one, row_top + tl.zeros((1,), tl.float32))
        tl.store(normalizer_ptr + row * 2 + 1 + one, log_sum)
        tl.debug_barrier()
        tl.atomic_add(done_ptr + 1, 1, sem="release")
    while tl.atomic_add(done_ptr + 1, 0, sem="acquire") == 0:
        pass
    row_top = tl.load(normalizer_ptr + row * 2, cache_modifier=".cg")
    log_sum = tl.load(normalizer_ptr + row * 2 + 1, cache_modifier=".cg")
    tl.store(out_ptr + row * vocab_size + column, (x - row_top) - log_sum, mask=inside)


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


@triton.jit(do_not_specialize=["M", "N", "steps", "blocks", "first_column"])
def _vocab_gemm(
    a_desc, b_desc, c_desc, top_ptr, sum_ptr, chosen_ptr, target_ptr, normalizer_ptr, grad_ptr,
    M, N, steps, blocks, first_column, temperature,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    SUBTILES: tl.constexpr, SCALE: tl.constexpr, GRAD: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    """Logits tile by tile; of each, only block sums and targets, or the gradient, are stored."""
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
                    acc, top_ptr, sum_ptr, chosen_ptr, target, row, column, n, M, N, blocks,
                    temperature, BLOCK_M, BLOCK_N, SCALE,
                )  # fmt: skip
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)


@triton.jit
def _store_sums(
    acc, top_ptr, sum_ptr, chosen_ptr, target, row, column, n, M, N, blocks, temperature,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    x = _scaled(acc, temperature, SCALE)
    x = tl.where((column < N)[None, :], x, -float("inf"))
    here = (target >= n) & (target < min(n + BLOCK_N, N))
    if tl.max(here.to(tl.int32), axis=0) == 1:
        # A maximum of one value: adding zeros instead would turn -0 into +0.
        chosen = tl.max(tl.where(column[None, :] == target[:, None], x, -float("inf")), axis=1)
        tl.store(chosen_ptr + row, chosen, mask=here & (row < M))
    PARTS: tl.constexpr = BLOCK_N // 2**_LOG2_BLOCK
    cut = tl.reshape(x, (BLOCK_M * PARTS, 2**_LOG2_BLOCK))
    top, total = block_sums(cut, BLOCK_M * PARTS)
    block = n // 2**_LOG2_BLOCK + tl.arange(0, PARTS)
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
    x = _scaled(acc, temperature, SCALE)
    hit = tl.where(column[None, :] == target[:, None], 1.0, 0.0)
    dlogits = (hit - tl.exp((x - row_top[:, None]) - log_sum[:, None])) * grad[:, None]
    if SUBTILES == 1:
        c_desc.store([m, n], dlogits.to(OUT))
    else:
        halves = tl.permute(tl.reshape(dlogits, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1))
        left, right = tl.split(halves)
        c_desc.store([m, n], left.to(OUT))
        c_desc.store([m, n + BLOCK_N // 2], right.to(OUT))


def _cuts(vocab_size: int) -> tuple[int, int, int]:
    """(blocks, blocks of a leaf, exponent of the leaf's padded length)."""
    blocks = triton.cdiv(vocab_size, BLOCK)
    leaf_blocks = triton.cdiv(vocab_size, BLOCK * LEAVES)
    return blocks, leaf_blocks, log2_ceil(leaf_blocks)


def log_normalize(logits: Tensor, temperature: float, out: Tensor | None = None) -> Tensor:
    """Log-softmax of logits [T, V] fp32 over the temperature -> [T, V] fp32.

    The logits are read once. `out` may be the logits themselves, if they are contiguous.
    """
    logits = rows_of(logits)
    rows, vocab_size = logits.shape
    if out is None:
        out = torch.empty(rows, vocab_size, dtype=torch.float32, device=logits.device)
    blocks, leaf_blocks, log2 = _cuts(vocab_size)
    part, warps = _normalize_part(blocks, logits.is_cuda)
    parts = triton.cdiv(blocks, part)
    new = functools.partial(torch.empty, dtype=torch.float32, device=logits.device)
    top, total = new(2, rows, blocks)
    normalizer = new(rows, 2)
    # The next place to take; then of each row, the programs that are done and whether it is folded.
    counters = torch.zeros(1 + 2 * rows, dtype=torch.int32, device=logits.device)
    if rows:
        _normalize_kernel[(rows * parts,)](
            logits, top, total, out, normalizer, counters, vocab_size, blocks, leaf_blocks, parts,
            logits.stride(0), temperature, SCALE=temperature != 1.0, LOG2=log2, BLOCKS=part,
            num_warps=warps, maxnreg=_PART_REGISTERS, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def logprobs(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """Normalised logits of hidden [T, H] over the temperature -> [T, V] fp32, made in place."""
    logits = linear(hidden, weight, out_dtype=torch.float32)
    return log_normalize(logits, temperature, out=logits)


def _normalize_part(blocks: int, on_gpu: bool) -> tuple[int, int]:
    """Blocks of one program and its warps. The interpreter runs programs one after another."""
    whole = triton.next_power_of_2(blocks)
    part = min(whole, _PART_BLOCKS) if on_gpu else whole
    return part, max(1, min(_PART_WARPS, part // 4))


def _launch(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    *,
    sums: tuple[Tensor, Tensor, Tensor] | None = None,
    backward: tuple[Tensor, Tensor, Tensor] | None = None,
    first_column: int = 0,
) -> None:
    """Run `_vocab_gemm` for block sums (top, sum, chosen) or for (dlogits, normalizer, grad)."""
    (rows, k), n = hidden.shape, weight.shape[0]
    fp32 = hidden.dtype == torch.float32
    kind = "vocab gradient" if backward else "vocab"
    config = _FP32_VOCAB if fp32 else tuning(kind, hidden, rows, n, k)
    block_m, block_n, block_k = config.block_m, config.block_n, config.block_k
    top, total, chosen = sums or (None, None, None)
    dlogits, normalizer, grad = backward or (None, None, None)
    c_block = [block_m, block_n // config.subtiles]
    c_desc = None if dlogits is None else descriptor(dlogits, c_block)
    tiles = triton.cdiv(rows, block_m) * triton.cdiv(n, block_n)
    _vocab_gemm[(min(tiles, processors(hidden)),)](
        descriptor(bulk(hidden), [block_m, block_k]), descriptor(bulk(weight), [block_n, block_k]),
        c_desc, top, total, chosen, targets.contiguous(), normalizer, grad,
        rows, n, triton.cdiv(k, block_k), triton.cdiv(n, BLOCK), first_column, temperature,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, GROUP=8, SUBTILES=config.subtiles,
        SCALE=temperature != 1.0, GRAD=backward is not None, OUT=TRITON_DTYPES[hidden.dtype],
        num_warps=config.warps, num_stages=config.stages, enable_fp_fusion=False,
    )  # fmt: skip


def token_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """hidden [T, H], weight [V, H], targets [T] -> (logprobs [T], (maximum, log sum) [T, 2])."""
    rows, vocab_size = len(hidden), weight.shape[0]
    blocks, leaf_blocks, log2 = _cuts(vocab_size)
    new = functools.partial(torch.empty, dtype=torch.float32, device=hidden.device)
    top, total = new(2, rows, blocks)
    # A target that no column has, an invalid one, gives NaN.
    chosen = new(rows).fill_(torch.nan)
    logprobs, normalizer = new(rows), new(rows, 2)
    if rows:
        _launch(hidden, weight, targets, temperature, sums=(top, total, chosen))
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
) -> tuple[Tensor, Tensor]:
    """grad [T] fp32 -> (dhidden [T, H], dweight [V, H]).

    Logits are computed again, one part of the vocabulary at a time; their gradient is rounded to
    the dtype of `hidden` for the two products that use it.
    """
    dhidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    dweight = torch.empty_like(weight, memory_format=torch.contiguous_format)
    if not len(hidden):
        return dhidden.to(hidden.dtype), dweight.zero_()
    grad, hidden = grad.contiguous(), hidden.contiguous()
    for first in range(0, weight.shape[0], _CHUNK):
        part = weight[first : first + _CHUNK]
        dlogits = bulk(torch.empty(len(hidden), len(part), dtype=hidden.dtype, device=grad.device))
        _launch(
            hidden, part, targets, temperature,
            backward=(dlogits, normalizer, grad), first_column=first,
        )  # fmt: skip
        input_gradient(dlogits, part, add_to=dhidden)
        weight_gradient(dlogits, hidden, out=dweight[first : first + _CHUNK])
    return dhidden.to(hidden.dtype), dweight


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
