"""The gated delta rule on a GPU, whole chunks: what does not wait for a state.

Letters as in `gated_delta.py`. A chunk of 64 rows is four blocks of 16; [16, 16] blocks of a
chunk's matrices are indexed by (block of rows, block of columns) and lie one after the other. Of
the block b, with T_b = (I + A_bb)^-1 and R_b = beta (v - exp(G) S k):

    u_b = T_b round(R_b - sum over c < b of A_bc u_c)

Row i of every product needs rows up to i alone: the masked ones are exact zeros, and a matrix unit
computes its rows by themselves.

Chunks are numbered over all sequences of a call; a sequence that resumes inside a chunk starts with
the rows that it kept.
"""

# Arguments of kernels have Triton's own types.
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from isomodels.kernels.common_triton import pairwise_sum

CHUNK = 64
BLOCK = 16


@triton.jit
def unit_rows(x, ROWS: tl.constexpr, LOG2: tl.constexpr, eps):
    """[ROWS, 2**LOG2] fp32 -> the same, each row over sqrt(|row|^2 + eps)."""
    squares = pairwise_sum(x * x, ROWS, LOG2)
    return x * tl.div_rn(1.0, tl.sqrt_rn(squares + eps))[:, None]


@triton.jit
def odd_state(state, HALVES: tl.constexpr):
    """The state with its last bit set, where it is kept as two halves of 16 bits.

    So its rounding to bf16 is never a tie, and rounding and remainder give the state back.
    """
    if HALVES:
        state = (state.to(tl.int32, bitcast=True) | 1).to(tl.float32, bitcast=True)
    return state


@triton.jit
def load_state(boundary_ptr, at, SIZE: tl.constexpr, mask, HALVES: tl.constexpr):
    """State elements `at` of one head; `boundary_ptr` is the head's fp32 place."""
    if HALVES:
        halves = boundary_ptr.to(tl.pointer_type(tl.int16))
        high = tl.load(halves + at, mask=mask, other=0).to(tl.int32)
        low = tl.load(halves + SIZE + at, mask=mask, other=0).to(tl.int32)
        state = ((high << 16) + low).to(tl.float32, bitcast=True)
    else:
        state = tl.load(boundary_ptr + at, mask=mask, other=0.0)
    return state


@triton.jit
def store_state(boundary_ptr, at, state, SIZE: tl.constexpr, mask, HALVES: tl.constexpr):
    """The opposite of `load_state`, of an odd state."""
    if HALVES:
        halves = boundary_ptr.to(tl.pointer_type(tl.int16))
        high = state.to(tl.bfloat16).to(tl.int16, bitcast=True)
        low = state.to(tl.int32, bitcast=True) - (high.to(tl.int32) << 16)
        tl.store(halves + at, high, mask=mask)
        tl.store(halves + SIZE + at, low.to(tl.int16), mask=mask)
    else:
        tl.store(boundary_ptr + at, state, mask=mask)


@triton.jit
def _chunks_of(new, length, slot, LEAST: tl.constexpr, PAGED: tl.constexpr):
    """Chunks that `new` tokens reach, at the end of `length`: none of a sequence left to others."""
    chunks = (new + 63) // 64
    if PAGED:
        chunks = ((length - new) % 64 + new + 63) // 64
        chunks = tl.where(slot >= 0, chunks, 0)
    return tl.where(new >= LEAST, chunks, 0)


@triton.jit(do_not_specialize=["num_seqs", "num_tokens"])
def plan_chunks(
    bounds_ptr, lengths_ptr, slots_ptr, table_ptr, first_ptr, out_ptr, num_seqs, num_tokens,
    WIDTH: tl.constexpr, LEAST: tl.constexpr, PAGED: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """Program n numbers the chunks of sequence n; the last one clears tokens of no sequence.

    table [chunks, 4]: sequence, token of the chunk's row 0, its first new row, its end.
    first [num_seqs + 1]: the number of each sequence's first chunk.
    """
    n = tl.program_id(0)
    if n == num_seqs:
        used = tl.load(bounds_ptr + num_seqs).to(tl.int64)
        for extra in range(0, num_tokens - used):
            for start in range(0, WIDTH, 1024):
                at = start + tl.arange(0, 1024)
                zero = tl.zeros((1024,), out_ptr.dtype.element_ty)
                tl.store(out_ptr + (used + extra) * WIDTH + at, zero, mask=at < WIDTH)
    else:
        before = 0
        for start in range(0, n, MANY):
            m = start + tl.arange(0, MANY)
            mask = m < n
            begin = tl.load(bounds_ptr + m, mask=mask, other=0)
            new = tl.load(bounds_ptr + m + 1, mask=mask, other=0) - begin
            length = new
            slot = new
            if PAGED:
                length = tl.load(lengths_ptr + m, mask=mask, other=0)
                slot = tl.load(slots_ptr + m, mask=mask, other=0)
            before += tl.sum(_chunks_of(new, length, slot, LEAST, PAGED), axis=0)
        begin = tl.load(bounds_ptr + n)
        new = tl.load(bounds_ptr + n + 1) - begin
        length = new
        slot = new
        if PAGED:
            length = tl.load(lengths_ptr + n)
            slot = tl.load(slots_ptr + n)
        chunks = _chunks_of(new, length, slot, LEAST, PAGED)
        filled = (length - new) % 64
        tl.store(first_ptr + n, before)
        if n == num_seqs - 1:
            tl.store(first_ptr + num_seqs, before + chunks)
        for c in range(0, chunks):
            at = table_ptr + (before + c) * 4
            tl.store(at, n)
            tl.store(at + 1, begin - filled + c * 64)
            tl.store(at + 2, tl.where(c == 0, filled, 0))
            tl.store(at + 3, tl.minimum(filled + new - c * 64, 64))


@triton.jit(do_not_specialize=["num_seqs"])
def decay_sums(
    g_ptr, beta_ptr, decays_ptr, slots_ptr, table_ptr, first_ptr, sums_ptr, betas_ptr,
    num_seqs, g_stride, beta_stride, decays_stride,
    HV: tl.constexpr, HEADS: tl.constexpr, PAGED: tl.constexpr,
):  # fmt: skip
    """G and beta of a chunk, head by head: [chunks, HV, 64] fp32, beta 0 where no new row is.

    The sums go from left to right. Rows past the end repeat the last sum.
    """
    c = tl.program_id(0)
    if c < tl.load(first_ptr + num_seqs):
        token = tl.load(table_ptr + c * 4 + 1).to(tl.int64)
        low = tl.load(table_ptr + c * 4 + 2)
        high = tl.load(table_ptr + c * 4 + 3)
        h = tl.arange(0, HEADS)
        r16 = tl.arange(0, 16)
        kept_ptr = decays_ptr
        if PAGED:
            slot = tl.load(slots_ptr + tl.load(table_ptr + c * 4)).to(tl.int64)
            kept_ptr += slot * decays_stride
        total = tl.zeros((HEADS,), tl.float32)
        out = (c.to(tl.int64) * HV + h) * 64
        for start in range(0, 64, 16):
            r = start + r16
            mask = ((r >= low) & (r < high))[:, None] & (h < HV)[None, :]
            at = token + r[:, None]
            g = tl.load(g_ptr + at * g_stride + h[None, :], mask=mask, other=0.0)
            beta = tl.load(beta_ptr + at * beta_stride + h[None, :], mask=mask, other=0.0)
            tl.store(betas_ptr + out[None, :] + r[:, None], beta, mask=(h < HV)[None, :])
            if PAGED:
                old = (r < low)[:, None] & (h < HV)[None, :]
                kept = tl.load(kept_ptr + h[None, :] * 320 + r[:, None], mask=old, other=0.0)
            for i in tl.static_range(16):
                total = total + tl.sum(tl.where(r16[:, None] == i, g, 0.0), axis=0)
                if PAGED:
                    was = tl.sum(tl.where(r16[:, None] == i, kept, 0.0), axis=0)
                    total = tl.where(start + i < low, was, total)
                tl.store(sums_ptr + out + start + i, total, mask=h < HV)


@triton.jit(do_not_specialize=["num_seqs"])
def chunk_matrices(
    q_ptr, k_ptr, keys_ptr, slots_ptr, table_ptr, first_ptr, sums_ptr, betas_ptr,
    queries_ptr, units_ptr, solve_ptr, reads_ptr, corner_ptr,
    num_seqs, q_stride, q_head, k_stride, k_head, keys_stride, scale, eps,
    HK: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, LOG2K: tl.constexpr,
    PAGED: tl.constexpr,
):  # fmt: skip
    """Of a chunk and key head: normalised rows; then, for each value head, blocks of matrices.

    queries, units: [chunks * 64, HK, KP]. solve: -A below the diagonal blocks; reads: P, both
    [chunks, HV, 4, 4, 16, 16]; corner: A of the diagonal blocks, [chunks, HV, 4, 16, 16] fp32.
    """
    KP: tl.constexpr = 2**LOG2K
    dtype = units_ptr.dtype.element_ty
    c = tl.program_id(0)
    if c < tl.load(first_ptr + num_seqs):
        hk = tl.program_id(1)
        token = tl.load(table_ptr + c * 4 + 1).to(tl.int64)
        low = tl.load(table_ptr + c * 4 + 2)
        high = tl.load(table_ptr + c * 4 + 3)
        r = tl.arange(0, 64)
        d = tl.arange(0, KP)
        new = (r >= low) & (r < high)
        mask = new[:, None] & (d < K)[None, :]
        at = token + r[:, None]
        q = tl.load(q_ptr + at * q_stride + hk * q_head + d[None, :], mask=mask, other=0.0)
        q = (unit_rows(q.to(tl.float32), 64, LOG2K, eps) * scale).to(dtype)
        k = tl.load(k_ptr + at * k_stride + hk * k_head + d[None, :], mask=mask, other=0.0)
        k = unit_rows(k.to(tl.float32), 64, LOG2K, eps).to(dtype)
        if PAGED:
            slot = tl.load(slots_ptr + tl.load(table_ptr + c * 4)).to(tl.int64)
            kept = keys_ptr + slot * keys_stride + (r[:, None] * HK + hk) * K + d[None, :]
            old = (r < low)[:, None]
            k = tl.where(old, tl.load(kept, mask=old & (d < K)[None, :], other=0.0), k)
        rows = ((c.to(tl.int64) * 64 + r[:, None]) * HK + hk) * KP + d[None, :]
        tl.store(queries_ptr + rows, q)
        tl.store(units_ptr + rows, k)
        kk = tl.dot(k, tl.trans(k), input_precision="ieee")
        qk = tl.dot(q, tl.trans(k), input_precision="ieee")
        i, j = r[:, None], r[None, :]
        block = ((i // 16) * 4 + j // 16) * 256 + (i % 16) * 16 + j % 16
        diagonal = (i // 16) * 256 + (i % 16) * 16 + j % 16
        for g in tl.static_range(GROUP):
            head = c.to(tl.int64) * (HK * GROUP) + hk * GROUP + g
            sums = tl.load(sums_ptr + head * 64 + r)
            beta = tl.load(betas_ptr + head * 64 + r)
            decay = tl.exp(tl.where(i >= j, sums[:, None] - sums[None, :], 0.0))
            a = tl.where((i > j) & new[:, None], (kk * decay) * beta[:, None], 0.0)
            p = tl.where((i >= j) & new[:, None], qk * decay, 0.0)
            tl.store(reads_ptr + head * 4096 + block, p.to(dtype), mask=i // 16 >= j // 16)
            below = i // 16 > j // 16
            tl.store(solve_ptr + head * 4096 + block, (0.0 - a).to(dtype), mask=below)
            tl.store(corner_ptr + head * 1024 + diagonal, a, mask=i // 16 == j // 16)


@triton.jit(do_not_specialize=["num_seqs"])
def solve_blocks(
    corner_ptr, decays_ptr, slots_ptr, table_ptr, first_ptr, solve_ptr, open_ptr,
    num_seqs, decays_stride, HV: tl.constexpr, PAGED: tl.constexpr,
):  # fmt: skip
    """T of the four diagonal blocks: row i is e_i less the sum of a_ij T_j, j by neighbours.

    open [num_seqs, HV, 16, 16] fp32: T of the block that the sequence's last row lies in.
    """
    c = tl.program_id(0)
    if c < tl.load(first_ptr + num_seqs):
        h = tl.program_id(1)
        head = c.to(tl.int64) * HV + h
        row = tl.arange(0, 64)  # a block and a column m of T
        b, m = (row // 16)[:, None], (row % 16)[:, None]
        j = tl.arange(0, 16)[None, :]
        low = tl.load(table_ptr + c * 4 + 2)
        t = tl.zeros((64, 16), tl.float32)  # [block and m, j]: T_jm
        if PAGED:
            n = tl.load(table_ptr + c * 4)
            slot = tl.load(slots_ptr + n).to(tl.int64)
            kept = decays_ptr + slot * decays_stride + h * 320 + 64 + j * 16 + m
            t = tl.load(kept, mask=(b == low // 16) & (j < low % 16), other=0.0)
        for i in range(0, 16):
            a = tl.load(corner_ptr + head * 1024 + b * 256 + i * 16 + j + m * 0)
            made = tl.where(row % 16 == i, 1.0, 0.0) - pairwise_sum(a * t, 64, 4)
            t = tl.where((j == i) & (b * 16 + i >= low), made[:, None], t)
        at = head * 4096 + b * 1280 + j * 16 + m
        tl.store(solve_ptr + at, t.to(solve_ptr.dtype.element_ty))
        if PAGED:
            high = tl.load(table_ptr + c * 4 + 3)
            tl.store(
                open_ptr + (n.to(tl.int64) * HV + h) * 256 + j * 16 + m, t,
                mask=(b == high // 16) & (j < high % 16),
            )  # fmt: skip
