"""Triton backend of the gradients of packed attention.

Two kernels recompute the probabilities from the saved log-sum-exp: one walks the queries of a KV
tile (dk and dv, the heads of a group in ascending order), one the keys of a query tile (dq). No
atomics: the bits are the same from run to run. They are not part of the parity contract.

Mathematics: Dao et al., FlashAttention (2022), appendix B.
"""

# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from isomodels.kernels.attention_triton import LOG2E, find_tile, tensor_map, unit_rows, use_tma

_LOG2E = tl.constexpr(LOG2E)


def backward_configs(head_dim: int, dtype: torch.dtype) -> tuple[dict[str, int], dict[str, int]]:
    """Tuning of the dk/dv kernel and of the dq kernel."""
    if dtype == torch.float32:
        small = {"BLOCK_M": 16, "BLOCK_N": 32, "num_warps": 4, "num_stages": 1}
        return small, {**small, "BLOCK_M": 32, "BLOCK_N": 16}
    if head_dim > 128:
        tile = {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 8, "num_stages": 2}
        return {**tile, "BLOCK_M": 32}, tile
    return (
        {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 2},
        {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 3},
    )


@triton.jit(do_not_specialize=["num_seqs"])
def _row_terms(
    out_ptr, grad_ptr, lse_ptr, terms_ptr, cu_seqlens, num_seqs, num_slots, num_heads,
    BLOCK_M: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """terms [2, heads, slots]: the log-sum-exp in powers of two, and the sum of out * grad over D.

    Each sequence starts at a multiple of BLOCK_M; rows that do not exist have probability
    exp2(-inf) = 0, so that the loops over queries need no mask for the end of a sequence.
    """
    head = tl.program_id(1)
    slots = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    seq, tile = find_tile(cu_seqlens, tl.program_id(0), num_seqs, BLOCK_M)
    first_row = tl.load(cu_seqlens + seq)
    num_rows = tl.load(cu_seqlens + seq + 1) - first_row
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    valid = rows < num_rows
    at = (first_row + rows).to(tl.int64) * num_heads + head
    out_at = at[:, None] * D + tl.arange(0, D)[None, :]
    out = tl.load(out_ptr + out_at, mask=valid[:, None], other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + out_at, mask=valid[:, None], other=0.0).to(tl.float32)
    lse = tl.load(lse_ptr + at, mask=valid, other=float("inf"))
    terms_ptr += head.to(tl.int64) * num_slots
    tl.store(terms_ptr + slots, lse * _LOG2E)
    delta_ptr = terms_ptr + tl.cast(num_heads, tl.int64) * num_slots
    tl.store(delta_ptr + slots, tl.sum(out * grad, 1))


@triton.jit
def _load(ptr, desc, first_row, rows, num_rows, stride, column, TMA: tl.constexpr, D: tl.constexpr):
    """A tile [rows, D] of one sequence: `rows` [M] counted from its start at `first_row`."""
    if TMA:
        return desc.load([first_row, column])
    at = rows.to(tl.int64)[:, None] * stride + tl.arange(0, D)[None, :]
    return tl.load(ptr + at, mask=(rows < num_rows)[:, None], other=0.0)


@triton.jit
def _load_terms(ptr, desc, row, slot, num_slots, TMA: tl.constexpr, M: tl.constexpr):
    """One row of the terms, M slots from `slot` on."""
    if TMA:
        return tl.reshape(desc.load([row, slot]), [M])
    return tl.load(ptr + row.to(tl.int64) * num_slots + slot + tl.arange(0, M))


@triton.jit
def _key_gradients(
    dk, dv, k, v, keys, q_ptr, q_desc, grad_ptr, grad_desc, terms_ptr, terms_desc, first_row,
    num_rows, first_slot, num_slots, head, num_heads, first, last, scale_log2, stride_qt, stride_qh,
    TMA: tl.constexpr, MASKED: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Query blocks [first, last) of one head."""
    for block in range(first, last):
        rows = block * M + tl.arange(0, M)
        start = first_row + block * M
        q = _load(
            q_ptr + head * stride_qh, q_desc, start, rows, num_rows, stride_qt, head * D, TMA, D
        )
        slot = first_slot + block * M
        lse = _load_terms(terms_ptr, terms_desc, head, slot, num_slots, TMA, M)
        s = tl.dot(k, tl.trans(q), input_precision="ieee")  # [N, M]
        p = tl.exp2(s * scale_log2 - lse[None, :])
        if MASKED:
            p = tl.where(keys[:, None] <= rows[None, :], p, 0.0)
        grad = _load(
            grad_ptr + head * D, grad_desc, start, rows, num_rows, num_heads * D, head * D, TMA, D
        )
        dv = tl.dot(p.to(grad.dtype), grad, dv, input_precision="ieee")
        delta = _load_terms(terms_ptr, terms_desc, num_heads + head, slot, num_slots, TMA, M)
        dp = tl.dot(v, tl.trans(grad), input_precision="ieee")
        ds = p * (dp - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit
def _rows_to_write(seq, num_seqs, first_row, num_rows, num_tokens):
    """Rows that the tiles of a sequence write: the last one's also write zeros to the tokens after
    it, for which they suffice, whatever its start."""
    return tl.where(seq == num_seqs - 1, num_tokens - first_row, num_rows)


@triton.jit(do_not_specialize=["num_tokens", "num_seqs"])
def _dkdv(
    q_ptr, k_ptr, v_ptr, grad_ptr, q_desc, grad_desc, terms_desc, terms_ptr, dk_ptr, dv_ptr,
    cu_seqlens, scale, scale_log2, num_tokens, num_slots, num_seqs, num_heads,
    stride_qt, stride_qh, stride_kt, stride_kh,
    GROUP: tl.constexpr, TMA: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    num_kv_heads = num_heads // GROUP
    kv_head = tl.program_id(0) % num_kv_heads
    # The first KV tile of a sequence is the longest to run, and comes first.
    seq, tile = find_tile(cu_seqlens, tl.program_id(0) // num_kv_heads, num_seqs, BLOCK_N)
    first_row = tl.load(cu_seqlens + seq)
    num_rows = tl.load(cu_seqlens + seq + 1) - first_row
    written = _rows_to_write(seq, num_seqs, first_row, num_rows, num_tokens)
    offset = first_row.to(tl.int64)
    keys = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    dim = tl.arange(0, D)
    valid = (keys < num_rows)[:, None]
    out_at = ((offset + keys)[:, None] * num_kv_heads + kv_head) * D + dim[None, :]
    if tile * BLOCK_N >= num_rows:
        zeros = tl.zeros([BLOCK_N, D], dk_ptr.dtype.element_ty)
        tl.store(dk_ptr + out_at, zeros, mask=(keys < written)[:, None])
        tl.store(dv_ptr + out_at, zeros, mask=(keys < written)[:, None])
        return
    q_ptr += offset * stride_qt
    grad_ptr += offset * num_heads * D
    first_slot = (first_row // BLOCK_M + seq) * BLOCK_M
    at = (offset + keys)[:, None] * stride_kt + kv_head * stride_kh + dim[None, :]
    k = tl.load(k_ptr + at, mask=valid, other=0.0)
    v = tl.load(v_ptr + at, mask=valid, other=0.0)
    dk = tl.zeros([BLOCK_N, D], tl.float32)
    dv = tl.zeros([BLOCK_N, D], tl.float32)
    first = tile * BLOCK_N // BLOCK_M
    last = tl.cdiv(num_rows, BLOCK_M)
    turn = tl.minimum(tl.cdiv((tile + 1) * BLOCK_N, BLOCK_M), last)
    for member in range(0, GROUP):
        head = kv_head * GROUP + member
        dk, dv = _key_gradients(
            dk, dv, k, v, keys, q_ptr, q_desc, grad_ptr, grad_desc, terms_ptr, terms_desc,
            first_row, num_rows, first_slot, num_slots, head, num_heads, first, turn, scale_log2,
            stride_qt, stride_qh, TMA, True, BLOCK_M, D,
        )  # fmt: skip
        dk, dv = _key_gradients(
            dk, dv, k, v, keys, q_ptr, q_desc, grad_ptr, grad_desc, terms_ptr, terms_desc,
            first_row, num_rows, first_slot, num_slots, head, num_heads, turn, last, scale_log2,
            stride_qt, stride_qh, TMA, False, BLOCK_M, D,
        )  # fmt: skip
    dk = tl.where(valid, dk * scale, 0.0).to(dk_ptr.dtype.element_ty)
    dv = tl.where(valid, dv, 0.0).to(dv_ptr.dtype.element_ty)
    tl.store(dk_ptr + out_at, dk, mask=(keys < written)[:, None])
    tl.store(dv_ptr + out_at, dv, mask=(keys < written)[:, None])


@triton.jit
def _query_gradient(
    dq, q, grad, lse, delta, rows, k_ptr, v_ptr, k_desc, v_desc, first_row, num_rows, column,
    first, last, scale_log2, stride_kt,
    TMA: tl.constexpr, MASKED: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """KV blocks [first, last)."""
    for block in range(first, last):
        keys = block * N + tl.arange(0, N)
        start = first_row + block * N
        k = _load(k_ptr, k_desc, start, keys, num_rows, stride_kt, column, TMA, D)
        v = _load(v_ptr, v_desc, start, keys, num_rows, stride_kt, column, TMA, D)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")  # [M, N]
        p = tl.exp2(s * scale_log2 - lse[:, None])
        if MASKED:
            p = tl.where(keys[None, :] <= rows[:, None], p, 0.0)
        dp = tl.dot(grad, tl.trans(v), input_precision="ieee")
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    return dq


@triton.jit(do_not_specialize=["num_tokens", "num_tiles", "num_seqs"])
def _dq(
    q_ptr, k_ptr, v_ptr, grad_ptr, k_desc, v_desc, terms_ptr, dq_ptr,
    cu_seqlens, scale, scale_log2, num_tokens, num_tiles, num_slots, num_seqs, num_heads,
    stride_qt, stride_qh, stride_kt, stride_kh,
    GROUP: tl.constexpr, TMA: tl.constexpr, SLOT_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) % num_heads
    reverse = num_tiles - 1 - tl.program_id(0) // num_heads
    seq, tile = find_tile(cu_seqlens, reverse, num_seqs, BLOCK_M)
    first_row = tl.load(cu_seqlens + seq)
    num_rows = tl.load(cu_seqlens + seq + 1) - first_row
    written = _rows_to_write(seq, num_seqs, first_row, num_rows, num_tokens)
    offset = first_row.to(tl.int64)
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    dim = tl.arange(0, D)
    valid = rows < num_rows
    tokens = offset + rows
    out_at = (tokens[:, None] * num_heads + head) * D + dim[None, :]
    if tile * BLOCK_M >= num_rows:
        zeros = tl.zeros([BLOCK_M, D], dq_ptr.dtype.element_ty)
        tl.store(dq_ptr + out_at, zeros, mask=(rows < written)[:, None])
        return
    k_ptr += offset * stride_kt + (head // GROUP) * stride_kh
    v_ptr += offset * stride_kt + (head // GROUP) * stride_kh

    q_at = tokens[:, None] * stride_qt + head * stride_qh + dim[None, :]
    q = tl.load(q_ptr + q_at, mask=valid[:, None], other=0.0)
    grad = tl.load(grad_ptr + out_at, mask=valid[:, None], other=0.0)
    terms_ptr += head.to(tl.int64) * num_slots + (first_row // SLOT_BLOCK + seq) * SLOT_BLOCK
    delta_ptr = terms_ptr + tl.cast(num_heads, tl.int64) * num_slots
    lse = tl.load(terms_ptr + rows, mask=valid, other=float("inf"))
    delta = tl.load(delta_ptr + rows, mask=valid, other=0.0)
    last = tl.cdiv(tl.minimum((tile + 1) * BLOCK_M, num_rows), BLOCK_N)
    turn = (tile * BLOCK_M + 1) // BLOCK_N
    dq = tl.zeros([BLOCK_M, D], tl.float32)
    dq = _query_gradient(
        dq, q, grad, lse, delta, rows, k_ptr, v_ptr, k_desc, v_desc, first_row, num_rows,
        (head // GROUP) * D, 0, turn, scale_log2, stride_kt, TMA, False, BLOCK_N, D,
    )  # fmt: skip
    dq = _query_gradient(
        dq, q, grad, lse, delta, rows, k_ptr, v_ptr, k_desc, v_desc, first_row, num_rows,
        (head // GROUP) * D, turn, last, scale_log2, stride_kt, TMA, True, BLOCK_N, D,
    )  # fmt: skip
    dq = tl.where(valid[:, None], dq * scale, 0.0).to(dq_ptr.dtype.element_ty)
    tl.store(dq_ptr + out_at, dq, mask=(rows < written)[:, None])


def attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, out: Tensor, lse: Tensor,
    scale: float, configs: tuple[dict, dict] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q [T, heads, D] and of k, v [T, kv_heads, D], in their dtype.

    `grad` and `out` are [T, heads, D], `lse` [T, heads]; `configs` overrides the tuning.
    """
    num_tokens, num_heads, head_dim = q.shape
    q, k, v, grad = unit_rows(q), unit_rows(k), unit_rows(v), grad.contiguous()
    if k.stride() != v.stride():
        k, v = k.contiguous(), v.contiguous()
    # The kernels write every row: tokens after the last sequence, if any, have no gradient.
    num_seqs = len(cu_seqlens) - 1
    make = torch.empty if num_seqs > 0 else torch.zeros
    dq, dk, dv = (make(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if not num_tokens or num_seqs <= 0:
        return dq, dk, dv
    keys_config, query_config = map(dict, configs or backward_configs(head_dim, q.dtype))
    wanted = q.dtype == torch.bfloat16
    keys_tma = keys_config.pop("TMA", wanted) and use_tma(q)
    query_tma = query_config.pop("TMA", wanted) and use_tma(k) and use_tma(v)
    block = keys_config["BLOCK_M"]
    blocks = num_tokens // block + num_seqs
    num_slots = blocks * block
    terms = torch.empty(2 * num_heads, num_slots, dtype=torch.float32, device=q.device)
    _row_terms[(blocks, num_heads)](
        out, grad, lse, terms, cu_seqlens, num_seqs, num_slots, num_heads,
        BLOCK_M=block, D=head_dim, num_warps=4,
    )  # fmt: skip

    num_kv_heads = k.shape[1]
    shared = {"GROUP": num_heads // num_kv_heads, "D": head_dim}
    strides = (q.stride(0), q.stride(1), k.stride(0), k.stride(1))
    maps: tuple = (None, None, None)
    if keys_tma:
        terms_map = TensorDescriptor(terms, list(terms.shape), [num_slots, 1], [1, block])
        maps = (tensor_map(q, block), tensor_map(grad, block), terms_map)
    tiles = num_tokens // keys_config["BLOCK_N"] + num_seqs
    _dkdv[(tiles * num_kv_heads,)](
        q, k, v, grad, *maps, terms, dk, dv, cu_seqlens, scale, scale * LOG2E, num_tokens,
        num_slots, num_seqs, num_heads, *strides, TMA=keys_tma, **shared, **keys_config,
    )  # fmt: skip
    step = query_config["BLOCK_N"]
    maps = (tensor_map(k, step), tensor_map(v, step)) if query_tma else (None, None)
    tiles = num_tokens // query_config["BLOCK_M"] + num_seqs
    _dq[(tiles * num_heads,)](
        q, k, v, grad, *maps, terms, dq, cu_seqlens, scale, scale * LOG2E, num_tokens, tiles,
        num_slots, num_seqs, num_heads, *strides, TMA=query_tma, SLOT_BLOCK=block, **shared,
        **query_config,
    )  # fmt: skip
    return dq, dk, dv
