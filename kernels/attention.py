"""Causal attention over packed sequences (`isomodels::attention`) and over a paged cache
(`isomodels::paged_attention`), with one definition for both.

For a query row at position p of its sequence, keys are walked in blocks of `KV_BLOCK` from
position 0: scores in fp32, the exact row maximum, exponentials, block sums by halving, blocks added
in ascending order. A row never sees which other rows share its tile, how its sequence was cut into
steps, or where its keys lie. Values are assumed finite; on the CPU those that are not make NaN of
the rows that see them, and of no other.

Mathematics: Vaswani et al. (2017); grouped heads, Ainslie et al. (2023).
"""

import itertools
from typing import Any

import torch
from torch import Tensor

from isomodels.kernels.fixed_order import TILE_COLUMNS, TILE_ROWS, fold_sum, one_thread, round_up
from isomodels.kernels.schedule import Schedule, declare

KV_BLOCK = TILE_COLUMNS
_TILES_AT_ONCE = 64  # tuning: bounds memory, cannot move a bit

_CONSTANTS: dict[str, int | str] = {
    "accumulate": "float32",
    "kv_block": KV_BLOCK,
    "softmax": "row maximum first, then exponentials",
    "block_sum": "halving",
    "block_order": "ascending from +0",
    "query_rows": TILE_ROWS,
}
SCHEDULE = declare(Schedule("attention", "torch", 1, _CONSTANTS))
PAGED_SCHEDULE = declare(Schedule("paged_attention", "torch", 1, _CONSTANTS))
WRITE_SCHEDULE = declare(Schedule("write_kv_cache", "torch", 1))

_TRITON_CONSTANTS: dict[str, int | str] = {
    "accumulate": "float32",
    "segment": 2048,
    "kv_block": 64,
    "softmax": "online in powers of two, offsets in scaled units",
    "probabilities": "rounded to the input dtype, for the sum too",
    "sum": "product with ones on the tensor core",
    "block_order": "ascending",
    "segment_order": "ascending",
}
TRITON_SCHEDULE = declare(Schedule("attention", "triton", 1, _TRITON_CONSTANTS))
TRITON_PAGED_SCHEDULE = declare(Schedule("paged_attention", "triton", 1, _TRITON_CONSTANTS))
TRITON_WRITE_SCHEDULE = declare(Schedule("write_kv_cache", "triton", 1))


@torch.library.custom_op("isomodels::attention", mutates_args=(), device_types="cpu")
def attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Causal attention of whole sequences, packed along the token axis.

    Args:
        q: [T, num_heads, head_dim], float32 or bfloat16.
        k, v: [T, num_kv_heads, head_dim], dtype of `q`.
        cu_seqlens: [num_seqs + 1] int32; sequence i holds tokens cu_seqlens[i] to cu_seqlens[i+1].
        scale: factor of the scores.

    Returns:
        (output [T, num_heads, head_dim] in the dtype of `q`,
        log-sum-exp of the scores [T, num_heads] fp32).
    """
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(q.shape[:2], dtype=torch.float32)
    bounds = cu_seqlens.tolist()
    with one_thread():
        for start, end in itertools.pairwise(bounds):
            if end > start:
                rows = slice(start, end)
                out[rows], lse[rows] = attend(q[rows], k[rows], v[rows], scale)
    return out, lse


@torch.library.custom_op("isomodels::paged_attention", mutates_args=(), device_types="cpu")
def paged_attention(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    scale: float,
    max_seqlen_q: int,
    max_seqlen_k: int,
) -> Tensor:
    """Causal attention of the newest tokens of each sequence over its cached keys and values.

    Args:
        q: [T, num_heads, head_dim], float32 or bfloat16.
        kv_cache: [num_blocks, num_kv_heads, block_size, 2 * head_dim], K then V, any strides;
            holds the new tokens too. Slots past a sequence's length are never read.
        block_table: [num_seqs, max_blocks] int32.
        cu_seqlens_q: [num_seqs + 1] int32 bounds of the new tokens in the token axis.
        seq_lens: [num_seqs] int32 lengths including the new tokens.
        scale: factor of the scores.
        max_seqlen_q, max_seqlen_k: upper bounds of the new tokens and of the length of a
            sequence, known to the host: they size launches and cannot move a bit.

    Returns:
        [T, num_heads, head_dim] in the dtype of `q`.
    """
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    block_size, head_dim = kv_cache.shape[2], q.shape[2]
    bounds = cu_seqlens_q.tolist()
    with one_thread():
        for i, length in enumerate(seq_lens.tolist()):
            rows = slice(bounds[i], bounds[i + 1])
            if rows.stop == rows.start:
                continue
            blocks = block_table[i, : round_up(length, block_size) // block_size].long()
            # [blocks, kv_heads, block_size, 2D] -> [length, kv_heads, 2D]
            pages = kv_cache[blocks].transpose(1, 2).flatten(0, 1)[:length]
            k, v = pages[..., :head_dim], pages[..., head_dim:]
            out[rows], _ = attend(q[rows], k, v, scale)
    return out


@torch.library.custom_op(
    "isomodels::write_kv_cache", mutates_args=("kv_cache",), device_types="cpu"
)
def write_kv_cache(k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Put new keys and values into their pages: a copy, no arithmetic.

    Args:
        k, v: [T, num_kv_heads, head_dim].
        kv_cache: [num_blocks, num_kv_heads, block_size, 2 * head_dim], dtype of `k`; changed.
        slot_mapping: [T] int64, block * block_size + offset, or -1 for a row that is padding.
    """
    if kv_cache.dtype != k.dtype:
        raise TypeError(f"the KV cache holds {kv_cache.dtype}, the model computes {k.dtype}")
    head_dim = k.shape[2]
    rows, blocks, offsets = page_places(slot_mapping, kv_cache.shape[2])
    kv_cache[blocks, :, offsets, :head_dim] = k[rows]
    kv_cache[blocks, :, offsets, head_dim:] = v[rows]


def page_places(slot_mapping: Tensor, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Slots [T] -> the rows that are no padding, and the block and the offset of each."""
    rows = (slot_mapping >= 0).nonzero().flatten()
    slots = slot_mapping[rows]
    return rows, slots // block_size, slots % block_size


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """One sequence on one thread of the CPU; latent attention shares it.

    q [n, heads, D] are its last n tokens, k [L, kv_heads, D] and v [L, kv_heads, V] all of it
    -> out [n, heads, V] in the dtype of q, log-sum-exp of the scores [n, heads] fp32.
    """
    n, num_heads, head_dim = q.shape
    length, num_kv_heads, _ = k.shape
    group = num_heads // num_kv_heads
    first_position = length - n

    # rows (token, head of the group) of one kv head: [kv_heads, n * group, D], padded to tiles
    q_rows = q.float().view(n, num_kv_heads, group, head_dim).transpose(0, 1)
    q_rows = q_rows.reshape(num_kv_heads, n * group, head_dim)
    num_rows = round_up(n * group, TILE_ROWS)
    q_tiles = torch.zeros(num_kv_heads, num_rows, head_dim, dtype=torch.float32)
    q_tiles[:, : n * group] = q_rows
    q_tiles = q_tiles.view(-1, TILE_ROWS, head_dim)  # the tiles of kv head 0, then of 1, ...
    k_blocks, v_blocks = _blocks(k), _blocks(v)

    # padding rows repeat the last position, so that no row is without a key
    tokens = (torch.arange(num_rows) // group).clamp_(max=n - 1)
    positions = (first_position + tokens).repeat(num_kv_heads).view(-1, TILE_ROWS)
    heads = torch.arange(num_kv_heads).repeat_interleave(num_rows // TILE_ROWS).tolist()

    out = torch.empty(*q_tiles.shape[:2], v.shape[-1], dtype=torch.float32)
    lse = torch.empty(q_tiles.shape[:2], dtype=torch.float32)
    for start in range(0, len(heads), _TILES_AT_ONCE):
        tiles = slice(start, start + _TILES_AT_ONCE)
        out[tiles], lse[tiles] = _attend_tiles(
            q_tiles[tiles], k_blocks, v_blocks, heads[tiles], positions[tiles], scale
        )
    # [kv_heads, n * group, V] -> [n, heads, V]
    out = out.view(num_kv_heads, num_rows, -1)[:, : n * group]
    out = out.reshape(num_kv_heads, n, group, -1).transpose(0, 1)
    lse = lse.view(num_kv_heads, num_rows)[:, : n * group]
    lse = lse.reshape(num_kv_heads, n, group).transpose(0, 1)
    return out.reshape(n, num_heads, -1).to(q.dtype), lse.reshape(n, num_heads)


def _blocks(x: Tensor) -> Tensor:
    """[L, kv_heads, D] -> [kv_heads, blocks, KV_BLOCK, D] fp32, zeros past L."""
    length, num_kv_heads, head_dim = x.shape
    out = torch.zeros(num_kv_heads, round_up(length, KV_BLOCK), head_dim, dtype=torch.float32)
    out[:, :length] = x.transpose(0, 1)
    return out.view(num_kv_heads, -1, KV_BLOCK, head_dim)


def _attend_tiles(
    q: Tensor, k: Tensor, v: Tensor, heads: list[int], positions: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Some tiles of a sequence.

    q [tiles, 16, D], k [kv_heads, blocks, 64, D], v [kv_heads, blocks, 64, V], kv head of each
    tile, positions [tiles, 16] -> out [tiles, 16, V], lse [tiles, 16].
    """
    blocks_of_tile = (positions[:, -1] // KV_BLOCK + 1).tolist()
    num_blocks = max(blocks_of_tile)
    scores = torch.zeros(num_blocks, len(q), TILE_ROWS, KV_BLOCK, dtype=torch.float32)
    k_blocks = [head.unbind() for head in k.unbind()]
    for tile, (q_tile, head) in enumerate(zip(q.unbind(), heads, strict=True)):
        for block in range(blocks_of_tile[tile]):
            torch.mm(q_tile, k_blocks[head][block].t(), out=scores[block, tile])
    keys = torch.arange(num_blocks * KV_BLOCK).view(num_blocks, 1, 1, KV_BLOCK)
    visible = keys <= positions[None, :, :, None]
    scores = torch.where(visible, scores * scale, -torch.inf)

    row_max = scores.amax((0, 3))  # exact in any order
    weights = torch.exp(scores - row_max[None, :, :, None])
    block_sums = fold_sum(weights)  # [blocks, tiles, 16]

    # 0 times NaN is NaN: values that are not finite must not reach rows before them.
    broken = ~torch.isfinite(v)
    sees = torch.zeros(len(q), TILE_ROWS, v.shape[-1], dtype=torch.bool)
    if broken.any():
        v = v.masked_fill(broken, 0.0)
        of_tile = broken.float()[heads]  # [tiles, blocks, 64, V]
        for block in range(num_blocks):
            sees |= torch.bmm(visible[block].float(), of_tile[:, block]) > 0

    # From +0 a sum never becomes -0, so blocks past a row's end (weights 0) leave it as it is.
    v_blocks = [head.unbind() for head in v.unbind()]
    total = torch.zeros(len(q), TILE_ROWS, dtype=torch.float32)
    out = torch.zeros(len(q), TILE_ROWS, v.shape[-1], dtype=torch.float32)
    for block in range(num_blocks):
        total = total + block_sums[block]
        product = torch.zeros_like(out)
        for tile, head in enumerate(heads):
            if block < blocks_of_tile[tile]:
                torch.mm(weights[block, tile], v_blocks[head][block], out=product[tile])
        out = out + product
    out = (out / total.unsqueeze(-1)).masked_fill_(sees, torch.nan)
    return out, row_max + torch.log(total)


@attention.register_kernel("cuda")
def _(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    from isomodels.kernels import attention_triton

    return attention_triton.attention(q, k, v, cu_seqlens, scale)


@paged_attention.register_kernel("cuda")
def _(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    scale: float,
    max_seqlen_q: int,
    max_seqlen_k: int,
) -> Tensor:
    from isomodels.kernels import attention_decode_triton

    return attention_decode_triton.paged_attention(
        q, kv_cache, block_table, cu_seqlens_q, seq_lens, scale, max_seqlen_q, max_seqlen_k
    )


@write_kv_cache.register_kernel("cuda")
def _(k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    from isomodels.kernels import attention_decode_triton

    attention_decode_triton.write_kv_cache(k, v, kv_cache, slot_mapping)


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    return out, q.new_empty(q.shape[:2], dtype=torch.float32)


@paged_attention.register_fake
def _(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    scale: float,
    max_seqlen_q: int,
    max_seqlen_k: int,
) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


@write_kv_cache.register_fake
def _(k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    return None


@torch.library.custom_op("isomodels::attention_backward", mutates_args=(), device_types="cpu")
def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `attention`; equal from run to run, no part of the parity contract.

    Args:
        grad: gradient of the output, [T, num_heads, head_dim].
        q, k, v, cu_seqlens, scale: as given to `attention`.
        out, lse: what it returned.

    Returns:
        Gradients of q, k and v, each of its shape and dtype.
    """
    dq, dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    for start, end in itertools.pairwise(cu_seqlens.tolist()):
        rows = slice(start, end)
        dq[rows], dk[rows], dv[rows] = _attend_backward(
            grad[rows], q[rows], k[rows], v[rows], out[rows], lse[rows], scale
        )
    return dq, dk, dv


@attention_backward.register_kernel("cuda")
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    from isomodels.kernels import attention_backward_triton as triton_backend

    return triton_backend.attention_backward(grad, q, k, v, cu_seqlens, out, lse, scale)


@attention_backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return dq, dk, dv


def _setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
    q, k, v, cu_seqlens, ctx.scale = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, cu_seqlens, *output)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple:
    return *attention_backward(grad, *ctx.saved_tensors, ctx.scale), None, None


def _attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of one sequence (Dao et al., FlashAttention, 2022, appendix B), dense, fp32.

    All [n, heads, D] except lse [n, heads] and k, v [n, kv_heads, D].
    """
    n, num_kv_heads, head_dim = k.shape
    group = q.shape[1] // num_kv_heads

    def heads_first(x: Tensor) -> Tensor:
        x = x.float().transpose(0, 1)  # [heads, n, D]
        return x if len(x) == num_kv_heads * group else x.repeat_interleave(group, 0)

    def sum_group(x: Tensor) -> Tensor:
        return x.view(num_kv_heads, group, n, head_dim).sum(1).transpose(0, 1)

    grad, q, k, v, out = map(heads_first, (grad, q, k, v, out))
    hidden = torch.ones(n, n, dtype=torch.bool).triu_(1)
    scores = (q @ k.transpose(1, 2)) * scale - lse.t().unsqueeze(-1)
    weights = torch.exp(scores).masked_fill_(hidden, 0.0)  # [heads, n, n]
    dv = weights.transpose(1, 2) @ grad
    dweights = grad @ v.transpose(1, 2) - (grad * out).sum(-1, keepdim=True)
    dscores = weights * dweights * scale
    dq = (dscores @ k).transpose(0, 1)
    return dq, sum_group(dscores.transpose(1, 2) @ q), sum_group(dv)


attention.register_autograd(_backward, setup_context=_setup_context)
