"""The gated delta rule on a GPU, row by row: what a decode does, from the state that it kept.

The same products as in `gated_delta_chunk_triton.py`, of one row. The 16 rows of the smallest tile
of the matrix units hold copies of k in their first half and of q in the second: so what is read of
the state and of the rows before is multiplied once. The state itself is read rounded, and written
only with the last row of a chunk.

What is read from memory is the left operand of its product: 64 rows or more of it go to the matrix
units as they lie in shared memory. (Triton 3.6 multiplies a transposed left operand in shared
memory wrongly: rows of u past the 32nd. They are the right operand.)
"""

# Arguments of kernels have Triton's own types.
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from isomodels.kernels.common_triton import pairwise_sum
from isomodels.kernels.gated_delta_chunk_triton import (
    load_state,
    odd_state,
    store_state,
    unit_rows,
)


@triton.jit
def _unit(ptr, K: tl.constexpr, LOG2K: tl.constexpr, scale, eps):
    """The row at `ptr`, normalised and times `scale`: [KP] in its dtype."""
    d = tl.arange(0, 2**LOG2K)
    x = tl.load(ptr + d, mask=d < K, other=0.0)
    unit = unit_rows(tl.reshape(x.to(tl.float32), (1, 2**LOG2K)), 1, LOG2K, eps)
    return tl.reshape((unit * scale).to(x.dtype), (2**LOG2K,))


@triton.jit
def _met(rows, pair):
    """rows [N, KP] times each of pair [16, KP]: [16, N] fp32."""
    return tl.trans(tl.dot(rows, tl.trans(pair), input_precision="ieee"))


@triton.jit
def _read_state(pair, boundary_ptr, begun, K: tl.constexpr, KP: tl.constexpr, column):
    """The rounded state of the first `begun` value channels times pair [16, KP]: [16, BV]."""
    d = tl.arange(0, KP)
    at = column[:, None] * K + d[None, :]
    mask = (column < begun)[:, None] & (d < K)[None, :]
    if pair.dtype == tl.bfloat16:
        half = boundary_ptr.to(tl.pointer_type(tl.bfloat16))
        state = tl.load(half + at, mask=mask, other=0.0)
    else:
        state = tl.load(boundary_ptr + at, mask=mask, other=0.0)
    return _met(state, pair)


@triton.jit
def _next_state(
    boundary_ptr, keys_ptr, updates_ptr, decays_ptr, total, begun, x, column,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """The state after a chunk whose rows are all kept, value channels x and these key channels."""
    r = tl.arange(0, 16)
    at = x[:, None] * K + column[None, :]
    inside = (x < V)[:, None]
    old = (x < begun)[:, None] & (column < K)[None, :]
    state = load_state(boundary_ptr, at, V * K, old, HALVES) * tl.exp(total) + 0.0
    for b in tl.static_range(0, 64, 16):
        rows = keys_ptr + (b + r)[:, None] * (HK * K) + column[None, :]
        keys = tl.load(rows, mask=(column < K)[None, :], other=0.0)
        rows = updates_ptr + (b + r)[None, :] * (HV * V) + x[:, None]
        u = tl.load(rows, mask=inside, other=0.0).to(tl.float32)
        u *= tl.exp(total - tl.load(decays_ptr + b + r))[None, :]
        state = tl.dot(u.to(keys.dtype), keys, state, input_precision="ieee")
    state = odd_state(state, HALVES)
    tl.debug_barrier()  # others of this program may still read these elements
    store_state(boundary_ptr, at, state, V * K, inside & (column < K)[None, :], HALVES)


@triton.jit
def decode_rows(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, boundary_ptr, keys_ptr, updates_ptr, decays_ptr,
    slots_ptr, bounds_ptr, lengths_ptr, out_ptr,
    q_stride, q_head, k_stride, k_head, v_stride, v_head, g_stride, beta_stride,
    boundary_stride, keys_stride, updates_stride, decays_stride, scale, eps,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, LOG2K: tl.constexpr, V: tl.constexpr,
    BV: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """The new row of a sequence that has one, for BV value channels of one head.

    Programs that share rows of keys, decay sums and T write the same values to them, and read back
    none but their own.
    """
    KP: tl.constexpr = 2**LOG2K
    HALVES: tl.constexpr = k_ptr.dtype.element_ty == tl.bfloat16
    dtype = k_ptr.dtype.element_ty
    PARTS: tl.constexpr = (V + BV - 1) // BV
    part = tl.program_id(0) % PARTS
    h = (tl.program_id(0) // PARTS) % HV
    n = tl.program_id(0) // (PARTS * HV)
    hk = h // (HV // HK)
    begin = tl.load(bounds_ptr + n)
    new = tl.load(bounds_ptr + n + 1) - begin
    slot = tl.load(slots_ptr + n).to(tl.int64)
    if (new == 1) & (slot >= 0):
        position = tl.load(lengths_ptr + n) - 1
        boundary_ptr += slot * boundary_stride + h * (V * K)
        keys_ptr += slot * keys_stride + hk * K
        updates_ptr += slot * updates_stride + h * V
        decays_ptr += slot * decays_stride + h * 320
        x = part * BV + tl.arange(0, BV)
        inside = x < V
        d = tl.arange(0, KP)
        r = tl.arange(0, 16)
        wide = tl.arange(0, 64)
        is_key = (r < 8)[:, None]
        token = begin.to(tl.int64)
        begun = tl.where(position >= 64, V, 0)  # no state before the first whole chunk
        i = position % 64
        block = i // 16 * 16
        ii = i % 16
        k = _unit(k_ptr + token * k_stride + hk * k_head, K, LOG2K, 1.0, eps)
        q = _unit(q_ptr + token * q_stride + hk * q_head, K, LOG2K, scale, eps)
        v = tl.load(v_ptr + token * v_stride + h * v_head + x, mask=inside, other=0.0)
        beta = tl.load(beta_ptr + token * beta_stride + h)
        before = tl.where(i > 0, tl.load(decays_ptr + tl.maximum(i - 1, 0)), 0.0)
        total = before + tl.load(g_ptr + token * g_stride + h)
        pair = tl.where(is_key, k[None, :], q[None, :])
        read = _read_state(pair, boundary_ptr, begun, K, KP, x)
        read = read * tl.exp(total)
        acc = tl.where(is_key, (v.to(tl.float32)[None, :] - read) * beta, read) + 0.0

        # blocks before this one
        done = wide < block
        whole = done[:, None] & inside[None, :]
        kept = keys_ptr + wide[:, None] * (HK * K) + d[None, :]
        keys = tl.load(kept, mask=done[:, None] & (d < K)[None, :], other=0.0)
        u = tl.load(updates_ptr + wide[:, None] * (HV * V) + x[None, :], mask=whole, other=0.0)
        decay = tl.exp(total - tl.load(decays_ptr + wide, mask=done, other=0.0))
        met = _met(keys, pair) * decay[None, :]
        met = tl.where(is_key, 0.0 - met * beta, met)
        met = tl.where(done[None, :], met, 0.0).to(dtype)
        acc = tl.dot(met, u, acc, input_precision="ieee")

        # its own: right-hand sides instead of u
        old = r < ii
        here = r == ii
        kept = keys_ptr + (block + r)[:, None] * (HK * K) + d[None, :]
        keys = tl.load(kept, mask=old[:, None] & (d < K)[None, :], other=0.0)
        keys = tl.where(here[:, None], k[None, :], keys)
        kept = updates_ptr + (block + r)[:, None] * (HV * V) + x[None, :]
        right = tl.load(kept, mask=old[:, None] & inside[None, :], other=0.0)
        square = r[:, None] * 16 + r[None, :]
        # [m, j]: T_jm
        t = tl.load(decays_ptr + 64 + r[None, :] * 16 + r[:, None], mask=old[None, :], other=0.0)
        sums = tl.load(decays_ptr + block + r, mask=old, other=0.0)
        sums = tl.where(here, total, sums)
        decay = tl.exp(tl.where(r <= ii, total - sums, 0.0))
        met = tl.dot(pair, tl.trans(keys), input_precision="ieee") * decay[None, :]
        a = tl.where((r == 0)[:, None] & old[None, :], met * beta, 0.0)
        a = tl.sum(a, axis=0)  # of a column one term is not zero
        made = tl.where(here, 1.0, 0.0) - pairwise_sum(a[None, :] * t, 16, 4)
        t = tl.where(here[None, :], made[:, None], t)
        mine = tl.sum(tl.where((r == 0)[:, None], acc, 0.0), axis=0).to(dtype)
        right = tl.where(here[:, None], mine[None, :], right)
        u = tl.dot(tl.trans(t).to(dtype), right, input_precision="ieee").to(dtype)
        met = tl.where(is_key | (r > ii)[None, :], 0.0, met).to(dtype)
        acc = tl.dot(met, u, acc, input_precision="ieee")

        target = out_ptr + token * (HV * V) + h * V + x[None, :] + r[:, None] * 0
        tl.store(target, acc.to(dtype), mask=(r == 8)[:, None] & inside[None, :])
        tl.store(keys_ptr + i * (HK * K) + d, k, mask=d < K)
        tl.store(decays_ptr + i, total)
        tl.store(decays_ptr + 64 + square, tl.trans(t), mask=here[:, None])
        # a whole block keeps u
        kept = updates_ptr + (block + r)[:, None] * (HV * V) + x[None, :]
        stored = tl.where(ii == 15, u, right)
        first = tl.where(ii == 15, 0, ii)
        rows = (r >= first) & (r <= ii)
        tl.store(kept, stored, mask=rows[:, None] & inside[None, :])
        if i == 63:
            tl.debug_barrier()
            for start in range(0, KP, PIECE):
                columns = start + tl.arange(0, PIECE)
                _next_state(
                    boundary_ptr, keys_ptr, updates_ptr, decays_ptr, total, begun, x, columns,
                    HK, HV, K, V, HALVES,
                )  # fmt: skip
