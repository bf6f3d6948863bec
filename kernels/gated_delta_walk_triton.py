"""The gated delta rule on a GPU, whole chunks: the walk from state to state, and what is kept.

Letters and layouts as in `gated_delta_chunk_triton.py`. The state is transposed to its products,
[V, K]: a result then is the left operand of the next product without leaving its registers.
"""

# Arguments of kernels have Triton's own types.
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from isomodels.kernels.gated_delta_chunk_triton import load_state, odd_state, store_state


@triton.jit
def _block(ptr, at, row: tl.constexpr, column: tl.constexpr):
    """Block (row, column) of the matrices of a chunk and head, transposed: [16, 16]."""
    i = tl.arange(0, 16)
    place = at * 4096 + (row * 4 + column) * 256
    return tl.trans(tl.load(ptr + place + i[:, None] * 16 + i[None, :]))


@triton.jit
def _right(s, k, sums, beta, v):
    """beta (v - exp(G) S k), [BV, 16] fp32; v [BV, 16]."""
    read = tl.dot(s, tl.trans(k), input_precision="ieee")
    decay = tl.exp(sums)[None, :]
    return (v.to(tl.float32) - read * decay) * beta[None, :] + 0.0


@triton.jit
def _read(s, q_ptr, sums):
    """exp(G) S q of the rows at `q_ptr`: [BV, 16] fp32."""
    read = tl.dot(s, tl.trans(tl.load(q_ptr)), input_precision="ieee")
    return read * tl.exp(sums)[None, :] + 0.0


@triton.jit
def _product(a, b, total):
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def _written(u, k, decay, state):
    """The state after a block was written: u [BV, 16], k [16, KP]."""
    return _product((u.to(tl.float32) * decay[None, :]).to(k.dtype), k, state)


@triton.jit(do_not_specialize=["num_seqs"])
def walk_chunks(
    v_ptr, bounds_ptr, lengths_ptr, slots_ptr, first_ptr, sums_ptr, betas_ptr,
    queries_ptr, units_ptr, solve_ptr, reads_ptr, boundary_ptr, updates_ptr,
    out_ptr, open_ptr, states_ptr, rows_ptr,
    num_seqs, v_stride, v_head, boundary_stride, updates_stride,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr,
    BV: tl.constexpr, PAGED: tl.constexpr, OUT: tl.constexpr, KEEP: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """All chunks of a sequence, in order, for BV value channels of one head.

    open [num_seqs, 64, HV, V]: what a sequence keeps of its open chunk's rows, u of whole blocks
    and right-hand sides of the last. KEEP, for a backward: states [chunks, HV, V, KP], that before
    each chunk, and rows [chunks * 64, HV, V], the u of all.
    """
    HALVES: tl.constexpr = units_ptr.dtype.element_ty == tl.bfloat16
    dtype = units_ptr.dtype.element_ty
    PARTS: tl.constexpr = (V + BV - 1) // BV
    part = tl.program_id(0) % PARTS
    h = (tl.program_id(0) // PARTS) % HV
    n = tl.program_id(0) // (PARTS * HV)
    hk = h // (HV // HK)
    first = tl.load(first_ptr + n).to(tl.int64)
    chunks = (tl.load(first_ptr + n + 1) - first).to(tl.int32)
    begin = tl.load(bounds_ptr + n)
    rows = tl.load(bounds_ptr + n + 1) - begin  # with those kept of the first chunk
    filled = 0
    i = tl.arange(0, 16)
    d = tl.arange(0, KP)
    x = part * BV + tl.arange(0, BV)
    state = tl.zeros((BV, KP), tl.float32)
    square = x[:, None] * K + d[None, :]
    if PAGED:
        slot = tl.maximum(tl.load(slots_ptr + n), 0).to(tl.int64)
        length = tl.load(lengths_ptr + n)
        filled = (length - rows) % 64
        begun = tl.where(length - rows >= 64, V, 0)  # no state before the first whole chunk
        rows += filled
        boundary_ptr += slot * boundary_stride + h * (V * K)
        updates_ptr += slot * updates_stride + h * V
        inside = (x < begun)[:, None] & (d < K)[None, :]
        state = load_state(boundary_ptr, square, V * K, inside, HALVES)
    key = units_ptr + (first * 64 * HK + hk) * KP + i[:, None] * (HK * KP) + d[None, :]
    query = queries_ptr + (first * 64 * HK + hk) * KP + i[:, None] * (HK * KP) + d[None, :]
    token = begin.to(tl.int64) - filled
    for c in tl.range(0, chunks, num_stages=STAGES):
        at = (first + c) * HV + h
        end = rows - c * 64
        low = tl.where(c == 0, filled, 0)
        k0 = tl.load(key + c * (64 * HK * KP))
        k1 = tl.load(key + c * (64 * HK * KP) + 16 * HK * KP)
        k2 = tl.load(key + c * (64 * HK * KP) + 32 * HK * KP)
        k3 = tl.load(key + c * (64 * HK * KP) + 48 * HK * KP)
        s = state.to(dtype)
        g0 = tl.load(sums_ptr + at * 64 + i)
        g1 = tl.load(sums_ptr + at * 64 + 16 + i)
        g2 = tl.load(sums_ptr + at * 64 + 32 + i)
        g3 = tl.load(sums_ptr + at * 64 + 48 + i)
        last = tl.load(sums_ptr + at * 64 + 63)
        # [BV, 16] of rows 16 b + i
        value = v_ptr + (token + c * 64 + i)[None, :] * v_stride + h * v_head + x[:, None]
        there = (x < V)[:, None]
        is0 = there & ((i >= low) & (i < end))[None, :]
        is1 = there & ((16 + i >= low) & (16 + i < end))[None, :]
        is2 = there & ((32 + i >= low) & (32 + i < end))[None, :]
        is3 = there & ((48 + i >= low) & (48 + i < end))[None, :]
        v0 = tl.load(value, mask=is0, other=0.0)
        v1 = tl.load(value + 16 * v_stride, mask=is1, other=0.0)
        v2 = tl.load(value + 32 * v_stride, mask=is2, other=0.0)
        v3 = tl.load(value + 48 * v_stride, mask=is3, other=0.0)
        r0 = _right(s, k0, g0, tl.load(betas_ptr + at * 64 + i), v0)
        r1 = _right(s, k1, g1, tl.load(betas_ptr + at * 64 + 16 + i), v1)
        r2 = _right(s, k2, g2, tl.load(betas_ptr + at * 64 + 32 + i), v2)
        r3 = _right(s, k3, g3, tl.load(betas_ptr + at * 64 + 48 + i), v3)
        zero = tl.zeros((BV, 16), tl.float32)
        if PAGED:
            # kept rows: u of whole blocks, right-hand sides of the last
            kept = updates_ptr + i[None, :] * (HV * V) + x[:, None]
            o0 = there & (i < low)[None, :]
            o1 = there & (16 + i < low)[None, :]
            o2 = there & (32 + i < low)[None, :]
            o3 = there & (48 + i < low)[None, :]
            w0 = tl.load(kept, mask=o0, other=0.0)
            w1 = tl.load(kept + 16 * HV * V, mask=o1, other=0.0)
            w2 = tl.load(kept + 32 * HV * V, mask=o2, other=0.0)
            w3 = tl.load(kept + 48 * HV * V, mask=o3, other=0.0)
            r0 = tl.where(o0, w0.to(tl.float32), r0)
        b0 = r0.to(dtype)
        u0 = _product(b0, _block(solve_ptr, at, 0, 0), zero).to(dtype)
        if PAGED:
            u0 = tl.where(low >= 16, w0, u0)
        r1 = _product(u0, _block(solve_ptr, at, 1, 0), r1)
        r2 = _product(u0, _block(solve_ptr, at, 2, 0), r2)
        r3 = _product(u0, _block(solve_ptr, at, 3, 0), r3)
        if PAGED:
            r1 = tl.where(o1, w1.to(tl.float32), r1)
        b1 = r1.to(dtype)
        u1 = _product(b1, _block(solve_ptr, at, 1, 1), zero).to(dtype)
        if PAGED:
            u1 = tl.where(low >= 32, w1, u1)
        r2 = _product(u1, _block(solve_ptr, at, 2, 1), r2)
        r3 = _product(u1, _block(solve_ptr, at, 3, 1), r3)
        if PAGED:
            r2 = tl.where(o2, w2.to(tl.float32), r2)
        b2 = r2.to(dtype)
        u2 = _product(b2, _block(solve_ptr, at, 2, 2), zero).to(dtype)
        if PAGED:
            u2 = tl.where(low >= 48, w2, u2)
        r3 = _product(u2, _block(solve_ptr, at, 3, 2), r3)
        if PAGED:
            r3 = tl.where(o3, w3.to(tl.float32), r3)
        b3 = r3.to(dtype)
        u3 = _product(b3, _block(solve_ptr, at, 3, 3), zero).to(dtype)
        if OUT:
            q = query + c * (64 * HK * KP)
            target = out_ptr + (token + c * 64 + i)[None, :] * (HV * V) + h * V + x[:, None]
            y = _read(s, q, g0)
            y = _product(u0, _block(reads_ptr, at, 0, 0), y)
            tl.store(target, y.to(dtype), mask=is0)
            y = _read(s, q + 16 * HK * KP, g1)
            y = _product(u0, _block(reads_ptr, at, 1, 0), y)
            y = _product(u1, _block(reads_ptr, at, 1, 1), y)
            tl.store(target + 16 * HV * V, y.to(dtype), mask=is1)
            y = _read(s, q + 32 * HK * KP, g2)
            y = _product(u0, _block(reads_ptr, at, 2, 0), y)
            y = _product(u1, _block(reads_ptr, at, 2, 1), y)
            y = _product(u2, _block(reads_ptr, at, 2, 2), y)
            tl.store(target + 32 * HV * V, y.to(dtype), mask=is2)
            y = _read(s, q + 48 * HK * KP, g3)
            y = _product(u0, _block(reads_ptr, at, 3, 0), y)
            y = _product(u1, _block(reads_ptr, at, 3, 1), y)
            y = _product(u2, _block(reads_ptr, at, 3, 2), y)
            y = _product(u3, _block(reads_ptr, at, 3, 3), y)
            tl.store(target + 48 * HV * V, y.to(dtype), mask=is3)
        if KEEP:
            whole = states_ptr + at * (V * KP) + x[:, None] * KP + d[None, :]
            tl.store(whole, s, mask=there)
            target = rows_ptr + ((first + c) * 64 + i)[None, :] * (HV * V) + h * V + x[:, None]
            tl.store(target, u0, mask=there)
            tl.store(target + 16 * HV * V, u1, mask=there)
            tl.store(target + 32 * HV * V, u2, mask=there)
            tl.store(target + 48 * HV * V, u3, mask=there)
        full = end >= 64
        if PAGED:  # noqa: SIM102 (known when compiled)
            if end < 64:
                target = open_ptr + (n * 64 + i)[None, :] * (HV * V) + h * V + x[:, None]
                tl.store(target, tl.where(end >= 16, u0, b0), mask=there)
                tl.store(target + 16 * HV * V, tl.where(end >= 32, u1, b1), mask=there)
                tl.store(target + 32 * HV * V, tl.where(end >= 48, u2, b2), mask=there)
                tl.store(target + 48 * HV * V, b3, mask=there)
        # an open chunk leaves the state as it is: times 1, plus zeros
        state = state * tl.where(full, tl.exp(last), 1.0) + 0.0
        state = _written(u0, k0, tl.where(full, tl.exp(last - g0), 0.0), state)
        state = _written(u1, k1, tl.where(full, tl.exp(last - g1), 0.0), state)
        state = _written(u2, k2, tl.where(full, tl.exp(last - g2), 0.0), state)
        state = _written(u3, k3, tl.where(full, tl.exp(last - g3), 0.0), state)
        state = odd_state(state, HALVES)
    if PAGED:
        closed = tl.where((rows >= 64) & (chunks > 0), V, 0)
        inside = (x < closed)[:, None] & (d < K)[None, :]
        store_state(boundary_ptr, square, state, V * K, inside, HALVES)


@triton.jit(do_not_specialize=["num_seqs"])
def keep_rows(
    units_ptr, sums_ptr, open_t_ptr, open_u_ptr, bounds_ptr, lengths_ptr, slots_ptr, first_ptr,
    keys_ptr, updates_ptr, decays_ptr, num_seqs, keys_stride, updates_stride, decays_stride,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr,
    VP: tl.constexpr,
):  # fmt: skip
    """What sequence n keeps of its open chunk, value head h; nobody reads the pages any more."""
    n, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    end = tl.load(first_ptr + n + 1)
    filled = tl.load(lengths_ptr + n) % 64
    if (end > tl.load(first_ptr + n)) & (filled > 0):
        slot = tl.load(slots_ptr + n).to(tl.int64)
        chunk = (end - 1).to(tl.int64)
        hk = h // (HV // HK)
        r = tl.arange(0, 64)
        x = tl.arange(0, VP)
        d = tl.arange(0, KP)
        head = decays_ptr + slot * decays_stride + h * 320
        tl.store(head + r, tl.load(sums_ptr + (chunk * HV + h) * 64 + r), mask=r < filled)
        i = tl.arange(0, 16)
        square = i[:, None] * 16 + i[None, :]
        mine = (i < filled % 16)[:, None]
        t = tl.load(open_t_ptr + (n * HV + h) * 256 + square, mask=mine)
        tl.store(head + 64 + square, t, mask=mine)
        mask = (r < filled)[:, None] & (x < V)[None, :]
        rows = (r[:, None] * HV + h) * V + x[None, :]
        u = tl.load(open_u_ptr + n * (64 * HV * V) + rows, mask=mask)
        tl.store(updates_ptr + slot * updates_stride + rows, u, mask=mask)
        if h % (HV // HK) == 0:
            k = tl.load(units_ptr + ((chunk * 64 + r[:, None]) * HK + hk) * KP + d[None, :])
            place = keys_ptr + slot * keys_stride + (r[:, None] * HK + hk) * K + d[None, :]
            tl.store(place, k, mask=(r < filled)[:, None] & (d < K)[None, :])
