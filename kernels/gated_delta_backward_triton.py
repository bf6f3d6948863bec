"""Triton backend of `isomodels::gated_delta_rule_backward`.

The forward is computed again, keeping the state before each chunk and u; a walk from the last chunk
to the first finds the gradient of the state after each chunk and that of the right-hand sides; all
other gradients are then found for all chunks at once. Letters and layouts as in
`gated_delta_chunk_triton.py` and `gated_delta_backward.py`. Every sum is made by one program.
"""

# Arguments of kernels have Triton's own types.
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from isomodels.kernels.common_triton import log2_ceil
from isomodels.kernels.gated_delta_chunk import CHUNK, NORM_EPS
from isomodels.kernels.gated_delta_triton import Shape, Tiles, plain, prepare, walk

WALK_BACK = Tiles(64, 4, 2)
SLICE = 32  # value channels at a time of what is found for all chunks at once


@triton.jit
def _square(ptr, at, row: tl.constexpr, column: tl.constexpr):
    """Block (row, column) of the matrices of a chunk and head: [16, 16]."""
    i = tl.arange(0, 16)
    return tl.load(ptr + at * 4096 + (row * 4 + column) * 256 + i[:, None] * 16 + i[None, :])


@triton.jit
def _product(a, b, total):
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def _returned(ds, k, sums, last):
    """Gradient of u from the state after the chunk: exp(last - G) (dS' k), [BV, 16] fp32."""
    product = tl.dot(ds, tl.trans(k), input_precision="ieee")
    return product * tl.exp(last - sums)[None, :]


@triton.jit
def _past(dstate, do, dr, q, k, sums, beta):
    """Adds what a block's reads of the state before the chunk give to its gradient."""
    decay = tl.exp(sums)[None, :]
    dstate = _product((do.to(tl.float32) * decay).to(q.dtype), q, dstate)
    return _product((dr.to(tl.float32) * (0.0 - decay * beta[None, :])).to(q.dtype), k, dstate)


@triton.jit
def walk_back(
    grad_ptr, bounds_ptr, first_ptr, sums_ptr, betas_ptr, queries_ptr, units_ptr, solve_ptr,
    reads_ptr, dstates_ptr, drights_ptr, grad_stride, grad_head,
    HK: tl.constexpr, HV: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """All chunks of a sequence, last to first, for BV value channels of one head.

    dstates [chunks, HV, V, KP]: gradient of the state after each chunk; drights [chunks * 64, HV,
    V]: of the right-hand sides before beta.
    """
    dtype = units_ptr.dtype.element_ty
    PARTS: tl.constexpr = (V + BV - 1) // BV
    part = tl.program_id(0) % PARTS
    h = (tl.program_id(0) // PARTS) % HV
    n = tl.program_id(0) // (PARTS * HV)
    hk = h // (HV // HK)
    first = tl.load(first_ptr + n).to(tl.int64)
    chunks = (tl.load(first_ptr + n + 1) - first).to(tl.int32)
    begin = tl.load(bounds_ptr + n)
    rows = tl.load(bounds_ptr + n + 1) - begin
    i = tl.arange(0, 16)
    d = tl.arange(0, KP)
    x = part * BV + tl.arange(0, BV)
    there = (x < V)[:, None]
    dstate = tl.zeros((BV, KP), tl.float32)
    zero = tl.zeros((BV, 16), tl.float32)
    inner = i[:, None] * (HK * KP) + d[None, :]
    STEP: tl.constexpr = 16 * HK * KP
    for step in tl.range(0, chunks, num_stages=STAGES):
        c = chunks - 1 - step
        at = (first + c) * HV + h
        end = rows - c * 64
        key = units_ptr + ((first + c) * 64 * HK + hk) * KP + inner
        k0, k1, k2, k3 = (
            tl.load(key), tl.load(key + STEP), tl.load(key + 2 * STEP), tl.load(key + 3 * STEP),
        )  # fmt: skip
        sums = sums_ptr + at * 64 + i
        g0, g1, g2, g3 = tl.load(sums), tl.load(sums + 16), tl.load(sums + 32), tl.load(sums + 48)
        last = tl.load(sums_ptr + at * 64 + 63)
        token = begin.to(tl.int64) + c * 64 + i
        grad = grad_ptr + token[None, :] * grad_stride + h * grad_head + x[:, None]
        o0 = tl.load(grad, mask=there & (i < end)[None, :], other=0.0)
        o1 = tl.load(grad + 16 * grad_stride, mask=there & (16 + i < end)[None, :], other=0.0)
        o2 = tl.load(grad + 32 * grad_stride, mask=there & (32 + i < end)[None, :], other=0.0)
        o3 = tl.load(grad + 48 * grad_stride, mask=there & (48 + i < end)[None, :], other=0.0)
        ds = dstate.to(dtype)
        tl.store(dstates_ptr + at * (V * KP) + x[:, None] * KP + d[None, :], ds, mask=there)
        u = _product(o3, _square(reads_ptr, at, 3, 3), _returned(ds, k3, g3, last))
        r3 = _product(u.to(dtype), _square(solve_ptr, at, 3, 3), zero).to(dtype)
        u = _product(o2, _square(reads_ptr, at, 2, 2), _returned(ds, k2, g2, last))
        u = _product(o3, _square(reads_ptr, at, 3, 2), u)
        u = _product(r3, _square(solve_ptr, at, 3, 2), u)
        r2 = _product(u.to(dtype), _square(solve_ptr, at, 2, 2), zero).to(dtype)
        u = _product(o1, _square(reads_ptr, at, 1, 1), _returned(ds, k1, g1, last))
        u = _product(o2, _square(reads_ptr, at, 2, 1), u)
        u = _product(o3, _square(reads_ptr, at, 3, 1), u)
        u = _product(r3, _square(solve_ptr, at, 3, 1), u)
        u = _product(r2, _square(solve_ptr, at, 2, 1), u)
        r1 = _product(u.to(dtype), _square(solve_ptr, at, 1, 1), zero).to(dtype)
        u = _product(o0, _square(reads_ptr, at, 0, 0), _returned(ds, k0, g0, last))
        u = _product(o1, _square(reads_ptr, at, 1, 0), u)
        u = _product(o2, _square(reads_ptr, at, 2, 0), u)
        u = _product(o3, _square(reads_ptr, at, 3, 0), u)
        u = _product(r3, _square(solve_ptr, at, 3, 0), u)
        u = _product(r2, _square(solve_ptr, at, 2, 0), u)
        u = _product(r1, _square(solve_ptr, at, 1, 0), u)
        r0 = _product(u.to(dtype), _square(solve_ptr, at, 0, 0), zero).to(dtype)
        target = drights_ptr + ((first + c) * 64 + i)[None, :] * (HV * V) + h * V + x[:, None]
        tl.store(target, r0, mask=there)
        tl.store(target + 16 * HV * V, r1, mask=there)
        tl.store(target + 32 * HV * V, r2, mask=there)
        tl.store(target + 48 * HV * V, r3, mask=there)
        query = queries_ptr + ((first + c) * 64 * HK + hk) * KP + inner
        beta = betas_ptr + at * 64 + i
        dstate = dstate * tl.exp(last)
        dstate = _past(dstate, o0, r0, tl.load(query), k0, g0, tl.load(beta))
        dstate = _past(dstate, o1, r1, tl.load(query + STEP), k1, g1, tl.load(beta + 16))
        dstate = _past(dstate, o2, r2, tl.load(query + 2 * STEP), k2, g2, tl.load(beta + 32))
        dstate = _past(dstate, o3, r3, tl.load(query + 3 * STEP), k3, g3, tl.load(beta + 48))


@triton.jit
def _into_raw(grad, x_ptr, at, mask, eps):
    """Gradient of x / sqrt(|x|^2 + eps) taken to x, [64, KP] fp32."""
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, axis=1) + eps)[:, None]
    x *= inverse
    return (grad - x * tl.sum(grad * x, axis=1)[:, None]) * inverse


@triton.jit(do_not_specialize=["num_seqs"])
def chunk_gradients(
    grad_ptr, q_ptr, k_ptr, v_ptr, table_ptr, first_ptr, sums_ptr, betas_ptr,
    queries_ptr, units_ptr, states_ptr, dstates_ptr, rows_ptr, drights_ptr, dqs_ptr, dks_ptr,
    dq_ptr, dk_ptr, dv_ptr, dg_ptr, dbeta_ptr, num_seqs,
    grad_stride, grad_head, q_stride, q_head, k_stride, k_head, v_stride, v_head, scale, eps,
    HK: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr,
    VP: tl.constexpr, SLICE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """All gradients of a chunk's rows, for one key head and its value heads, one after the other.

    dqs, dks [chunks * 64, HK, KP] fp32: sums over the value heads so far. In registers they would
    leave none for the products over value channels, which go by SLICE.
    """
    dtype = units_ptr.dtype.element_ty
    HV: tl.constexpr = HK * GROUP
    c = tl.program_id(0)
    if c < tl.load(first_ptr + num_seqs):
        hk = tl.program_id(1)
        token = tl.load(table_ptr + c * 4 + 1).to(tl.int64)
        high = tl.load(table_ptr + c * 4 + 3)
        r = tl.arange(0, 64)
        d = tl.arange(0, KP)
        i, j = r[:, None], r[None, :]
        unit = ((c.to(tl.int64) * 64 + i) * HK + hk) * KP + d[None, :]
        for g in tl.range(0, GROUP, num_stages=1):
            h = hk * GROUP + g
            at = c.to(tl.int64) * HV + h
            beta = tl.load(betas_ptr + at * 64 + r)
            read = tl.zeros((64, KP), tl.float32)
            right = tl.zeros((64, KP), tl.float32)
            written = tl.zeros((64, KP), tl.float32)
            dqk = tl.zeros((64, 64), tl.float32)
            dkk = tl.zeros((64, 64), tl.float32)
            passed = tl.zeros((SLICE, KP), tl.float32)
            dbeta = tl.zeros((64,), tl.float32)
            for start in tl.range(0, VP, SLICE, num_stages=STAGES):
                x = start + tl.arange(0, SLICE)
                wide = x[None, :] < V
                inside = (i < high) & wide
                square = at * (V * KP) + x[:, None] * KP + d[None, :]
                state = tl.load(states_ptr + square, mask=(x < V)[:, None], other=0.0)
                dstate = tl.load(dstates_ptr + square, mask=(x < V)[:, None], other=0.0)
                do = grad_ptr + (token + i) * grad_stride + h * grad_head + x[None, :]
                do = tl.load(do, mask=inside, other=0.0)
                own = ((c.to(tl.int64) * 64 + i) * HV + h) * V + x[None, :]
                dr = tl.load(drights_ptr + own, mask=wide, other=0.0)
                u = tl.load(rows_ptr + own, mask=wide, other=0.0)
                v = v_ptr + (token + i) * v_stride + h * v_head + x[None, :]
                v = tl.load(v, mask=inside, other=0.0)
                read = _product(do, state, read)
                right = _product(dr, state, right)
                written = _product(u, dstate, written)
                dqk = _product(do, tl.trans(u), dqk)
                dkk = _product(dr, tl.trans(u), dkk)
                passed += state.to(tl.float32) * dstate
                dr = dr.to(tl.float32)
                dbeta += tl.sum(dr * v, axis=1)
                target = (token + i) * (HV * V) + h * V + x[None, :]
                tl.store(dv_ptr + target, (dr * beta[:, None]).to(dtype), mask=inside)

            # reads of the state, writes to it
            sums = tl.load(sums_ptr + at * 64 + r)
            last = tl.load(sums_ptr + at * 64 + 63)
            k = tl.load(units_ptr + unit)
            q = tl.load(queries_ptr + unit)
            decay = tl.exp(sums)[:, None]
            dq = read * decay
            later = tl.sum(dq * q, axis=1)
            right *= decay
            along_k = tl.sum(right * k, axis=1)
            later -= beta * along_k
            written *= tl.exp(last - sums)[:, None]
            earlier = tl.sum(written * k, axis=1)
            dk = written - beta[:, None] * right

            # rows of the chunk on each other
            decay = tl.exp(tl.where(i >= j, sums[:, None] - sums[None, :], 0.0))
            dqk = tl.where(i >= j, dqk * decay, 0.0)
            dkk = tl.where(i > j, 0.0 - dkk * decay, 0.0)
            pairs = tl.dot(k, tl.trans(k), input_precision="ieee") * dkk
            dbeta += tl.sum(pairs, axis=1) - along_k
            dkk *= beta[:, None]
            pairs *= beta[:, None]
            pairs += tl.dot(q, tl.trans(k), input_precision="ieee") * dqk
            dqk16 = dqk.to(dtype)
            both = (dkk + tl.trans(dkk)).to(dtype)
            dq = _product(dqk16, k, dq)
            dk = _product(tl.trans(dqk16), q, dk)
            dk = _product(both, k, dk)

            # g of row t is in every decay that passes t: sums of these alone, since a difference of
            # two sums would drown a small one
            passing = tl.cumsum(tl.where(i > j, pairs, 0.0), axis=0, reverse=True)
            dg = tl.sum(tl.where(i > j, passing, 0.0), axis=1)
            dg += tl.exp(last) * tl.sum(tl.sum(passed, axis=1), axis=0)
            dg += tl.sum(tl.where(j >= i, later[None, :], 0.0), axis=1)
            dg += tl.sum(tl.where(j < i, earlier[None, :], 0.0), axis=1)
            tl.store(dg_ptr + (token + r) * HV + h, dg, mask=r < high)
            tl.store(dbeta_ptr + (token + r) * HV + h, dbeta, mask=r < high)

            if g > 0:
                tl.debug_barrier()  # others of this program may have written these elements
                dq += tl.load(dqs_ptr + unit)
                dk += tl.load(dks_ptr + unit)
            if g < GROUP - 1:
                tl.store(dqs_ptr + unit, dq)
                tl.store(dks_ptr + unit, dk)
            else:
                inside = (i < high) & (d[None, :] < K)
                target = (token + i) * (HK * K) + hk * K + d[None, :]
                raw = (token + i) * q_stride + hk * q_head + d[None, :]
                dq = _into_raw(dq * scale, q_ptr, raw, inside, eps)
                tl.store(dq_ptr + target, dq.to(dtype), mask=inside)
                raw = (token + i) * k_stride + hk * k_head + d[None, :]
                dk = _into_raw(dk, k_ptr, raw, inside, eps)
                tl.store(dk_ptr + target, dk.to(dtype), mask=inside)


@triton.jit(do_not_specialize=["num_seqs", "num_tokens"])
def _clear_rest(
    bounds_ptr, dq_ptr, dk_ptr, dg_ptr, dbeta_ptr, num_seqs, num_tokens,
    KEYS: tl.constexpr, HEADS: tl.constexpr, KEYS2: tl.constexpr, HEADS2: tl.constexpr,
):  # fmt: skip
    """Zeros for tokens of no sequence; the gradient of v is cleared with the plan of the chunks."""
    key = tl.arange(0, KEYS2)
    head = tl.arange(0, HEADS2)
    used = tl.load(bounds_ptr + num_seqs).to(tl.int64)
    for extra in range(0, num_tokens - used):
        at = used + extra
        zero = tl.zeros((KEYS2,), dq_ptr.dtype.element_ty)
        tl.store(dq_ptr + at * KEYS + key, zero, mask=key < KEYS)
        tl.store(dk_ptr + at * KEYS + key, zero, mask=key < KEYS)
        none = tl.zeros((HEADS2,), tl.float32)
        tl.store(dg_ptr + at * HEADS + head, none, mask=head < HEADS)
        tl.store(dbeta_ptr + at * HEADS + head, none, mask=head < HEADS)


def gated_delta_rule_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, bounds: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, g and beta, as `isomodels::gated_delta_rule_backward`."""
    grad, q, k, v, g, beta = (plain(x) for x in (grad, q, k, v, g, beta))
    shape = Shape.of(k, v)
    dq, dk, dv, dg, dbeta = (
        torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v, g, beta)
    )
    sequences, heads, kp = len(bounds) - 1, shape.num_v_heads, 2**shape.log2_key
    if not v.numel() or sequences <= 0:
        return dq, dk, dv, dg, dbeta
    chunks = prepare(q, k, g, beta, bounds, dv, shape)
    count = len(chunks.sums)
    states, dstates = (v.new_empty(count, heads, shape.value_dim, kp) for _ in range(2))
    rows, drights = (v.new_empty(count * CHUNK, heads, shape.value_dim) for _ in range(2))
    walk(v, bounds, chunks, dv, shape, kept=(states, rows))
    tiles = shape.channels(WALK_BACK)
    parts = triton.cdiv(shape.value_dim, tiles.channels)
    walk_back[(sequences * heads * parts,)](
        grad, bounds, chunks.first, chunks.sums, chunks.betas, chunks.queries, chunks.units,
        chunks.solve, chunks.reads, dstates, drights, grad.stride(0), grad.stride(1),
        HK=shape.num_k_heads, HV=heads, KP=kp, V=shape.value_dim, BV=tiles.channels,
        STAGES=tiles.stages, num_warps=tiles.warps,
    )  # fmt: skip
    vp = max(16, 2 ** log2_ceil(shape.value_dim))
    dqs, dks = (torch.empty_like(chunks.units, dtype=torch.float32) for _ in range(2))
    chunk_gradients[(count, shape.num_k_heads)](
        grad, q, k, v, chunks.table, chunks.first, chunks.sums, chunks.betas,
        chunks.queries, chunks.units, states, dstates, rows, drights, dqs, dks,
        dq, dk, dv, dg, dbeta, sequences,
        grad.stride(0), grad.stride(1), q.stride(0), q.stride(1), k.stride(0), k.stride(1),
        v.stride(0), v.stride(1), shape.scale, NORM_EPS,
        HK=shape.num_k_heads, GROUP=heads // shape.num_k_heads, K=shape.key_dim, KP=kp,
        V=shape.value_dim, VP=vp, SLICE=min(SLICE, vp), STAGES=3, num_warps=8,
    )  # fmt: skip
    keys = shape.num_k_heads * shape.key_dim
    _clear_rest[(1,)](
        bounds, dq, dk, dg, dbeta, sequences, len(q), KEYS=keys, HEADS=heads,
        KEYS2=2 ** log2_ceil(keys), HEADS2=2 ** log2_ceil(heads), num_warps=4,
    )  # fmt: skip
    return dq, dk, dv, dg, dbeta
