"""The gated delta rule over packed sequences (`isomodels::gated_delta_rule`) and with a carried
state (`isomodels::paged_gated_delta_rule`), with one definition for both.

Per value head, with q and k normalised and S [V, K] zero at the start:

    S <- exp(g) S,    S <- S + beta (v - S k) k^T,    o = S q / sqrt(K)

It is computed in chunks of `CHUNK` tokens counted from position 0. With G the sum of g from the
chunk's first row, S the state before the chunk, and i, j rows of it:

    u_i = beta_i (v_i - exp(G_i) S k_i) - sum over j < i of beta_i exp(G_i - G_j) (k_i . k_j) u_j
    o_i = exp(G_i) S q_i + sum over j <= i of exp(G_i - G_j) (q_i . k_j) u_j
    S'  = exp(G_last) S + sum over j of exp(G_last - G_j) u_j k_j^T

Row i needs S and the rows before it alone. So a decode computes the one row that a prefill would
have, from the state before the chunk and the rows k, u and G of the open chunk. These four tensors
are the whole state: a sequence may be cut at any token. The state after a chunk is made when its
last row is there, by the same product in every case.

On a GPU the sum over j is cut into blocks of 16 rows, within which (I + A)^-1 is multiplied by the
right-hand sides: see `gated_delta_chunk_triton.py`.

Mathematics: Yang et al., "Gated Delta Networks" (2024); the chunked form, Yang et al.,
"Parallelizing Linear Transformers with the Delta Rule" (2024).
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from isomodels.kernels.fixed_order import TILE_ROWS, one_thread
from isomodels.kernels.gated_delta_chunk import CHUNK, State, forget, run_rows
from isomodels.kernels.schedule import Schedule, declare

_CONSTANTS: dict[str, int | str] = {
    "chunk": CHUNK,
    "accumulate": "float32",
    "norm": "x / sqrt(sum of squares + 1e-6), sum by halving",
    "decay_sum": "left to right from the chunk's first row",
    "rows": "forward substitution, sums over the chunk by halving",
    "state": "float32",
    "kept_rows": "k as given, u and decay sums float32",
    "product_rows": TILE_ROWS,
    "roundings": 1,
}
SCHEDULE = declare(Schedule("gated_delta_rule", "torch", 1, _CONSTANTS))
PAGED_SCHEDULE = declare(Schedule("paged_gated_delta_rule", "torch", 1, _CONSTANTS))

_TRITON: dict[str, int | str] = {
    "chunk": CHUNK,
    "block": 16,
    "accumulate": "float32, products of matrix units in ascending order of 16 terms",
    "operands": "model dtype: unit keys and queries, state, u, right-hand sides, masked matrices",
    "norm": "x / sqrt(sum of squares + 1e-6), sum of neighbours first",
    "decay_sum": "left to right from the chunk's first row",
    "rows": "inverse of a block row by row, its sums by neighbours; then blocks in ascending order",
    "state": "float32, its last bit set where operands are bfloat16",
    "roundings": 1,
}
TRITON_SCHEDULE = declare(Schedule("gated_delta_rule", "triton", 1, _TRITON))
TRITON_PAGED_SCHEDULE = declare(Schedule("paged_gated_delta_rule", "triton", 1, _TRITON))

Layout = tuple[tuple[tuple[int, ...], torch.dtype], ...]


def state_layout(
    num_k_heads: int,
    num_v_heads: int,
    key_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    device_type: str = "cpu",
) -> Layout:
    """Shape and dtype of each tensor of one sequence's state.

    Args:
        num_k_heads, num_v_heads, key_dim, value_dim: heads and their sizes.
        dtype: of the model.
        device_type: "cpu" or "cuda": each backend keeps what its own steps need.

    Returns:
        The state before the open chunk, then the open chunk's rows: keys, u, decay sums. What is in
        them is for their backend alone: on a GPU a bfloat16 model's state is two halves of 16 bits,
        keys are normalised, right-hand sides stand for u in the last block of 16 rows, and the
        inverse of that block follows the decay sums.
    """
    if device_type == "cuda":
        return (
            ((num_v_heads, value_dim, key_dim), torch.float32),
            ((CHUNK, num_k_heads, key_dim), dtype),
            ((CHUNK, num_v_heads, value_dim), dtype),
            ((num_v_heads, CHUNK + 16 * 16), torch.float32),
        )
    return (
        ((num_v_heads, value_dim, key_dim), torch.float32),
        ((CHUNK, num_k_heads, key_dim), dtype),
        ((CHUNK, num_v_heads, value_dim), torch.float32),
        ((CHUNK, num_v_heads), torch.float32),
    )


@torch.library.custom_op("isomodels::gated_delta_rule", mutates_args=(), device_types="cpu")
def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor
) -> Tensor:
    """The gated delta rule on whole sequences, packed along the token axis.

    Args:
        q, k: [T, num_k_heads, key_dim], float32 or bfloat16, not normalised, any strides.
        v: [T, num_v_heads, value_dim], dtype of `q`; value head j reads key head
            j // (num_v_heads / num_k_heads).
        g: [T, num_v_heads] fp32, logarithm of the decay, not above 0.
        beta: [T, num_v_heads] fp32.
        cu_seqlens: [num_seqs + 1] int32; sequence i holds tokens cu_seqlens[i] to cu_seqlens[i+1].

    Returns:
        [T, num_v_heads, value_dim] in the dtype of `q`.

    Raises:
        ValueError: naming shapes that do not fit.
        TypeError: for gates that are not float32.
    """
    _check(q, k, v, g, beta)
    bounds = cu_seqlens.tolist()
    counts = [end - start for start, end in itertools.pairwise(bounds)]
    layout = _layout_of(k, v, "cpu")
    with one_thread():
        fresh = State(*(k.new_zeros(len(counts), *s, dtype=d) for s, d in layout))
        return run_rows(q, k, v, g, beta, bounds[:-1], counts, [0] * len(counts), fresh)


@torch.library.custom_op(
    "isomodels::paged_gated_delta_rule",
    mutates_args=("boundary", "keys", "updates", "decays"),
    device_types="cpu",
)
def paged_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    boundary: Tensor,
    keys: Tensor,
    updates: Tensor,
    decays: Tensor,
    slots: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    max_seqlen_q: int,
) -> Tensor:
    """The gated delta rule on the newest tokens of each sequence, from the state it kept.

    Args:
        q, k, v, g, beta: as in `gated_delta_rule`.
        boundary, keys, updates, decays: [num_slots, ...] with the shapes and dtypes of
            `state_layout`, any strides; changed. A sequence that starts reads none of them, and
            rows past the open chunk's end are never read.
        slots: [num_seqs] int32, where each sequence's state lies.
        cu_seqlens_q: [num_seqs + 1] int32 bounds of the new tokens in the token axis.
        seq_lens: [num_seqs] int32 lengths including the new tokens.
        max_seqlen_q: upper bound of the new tokens of a sequence; a launch of decodes that is
            captured says 1.

    Returns:
        [T, num_v_heads, value_dim] in the dtype of `q`, zero for tokens of no sequence.

    Raises:
        ValueError: naming shapes that do not fit.
        TypeError: for gates or a state of another dtype.
    """
    _check(q, k, v, g, beta)
    pages = (boundary, keys, updates, decays)
    _check_pages(k, v, pages, "cpu")
    edges = list(itertools.pairwise(cu_seqlens_q.tolist()))
    lengths, all_slots = seq_lens.tolist(), slots.tolist()
    live = [i for i, (start, end) in enumerate(edges) if end > start]
    if not live:
        return v.new_zeros(v.shape)
    starts = [edges[i][0] for i in live]
    counts = [edges[i][1] - edges[i][0] for i in live]
    history = [lengths[i] - count for i, count in zip(live, counts, strict=True)]
    filled = [length % CHUNK for length in history]
    where = torch.tensor([all_slots[i] for i in live], dtype=torch.int64, device="cpu")
    with one_thread():
        state = State(*(page[where] for page in pages))
        forget(state, history, filled)
        out = run_rows(q, k, v, g, beta, starts, counts, filled, state)
        for page, tensor in zip(pages, state.tensors(), strict=True):
            page[where] = tensor
    return out


def _check(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> None:
    fits = q.dim() == v.dim() == 3 and q.shape == k.shape and len(v) == len(k)
    if not fits or v.shape[1] % k.shape[1] or not g.shape == beta.shape == v.shape[:2]:
        raise ValueError(
            "gated_delta_rule needs q and k [T, k_heads, K], v [T, v_heads, V] with a multiple of "
            f"k_heads, g and beta [T, v_heads], got {list(q.shape)}, {list(k.shape)}, "
            f"{list(v.shape)}, {list(g.shape)} and {list(beta.shape)}"
        )
    if g.dtype != torch.float32 or beta.dtype != torch.float32:
        raise TypeError(f"g and beta must be float32, got {g.dtype} and {beta.dtype}")


def _layout_of(k: Tensor, v: Tensor, device_type: str) -> Layout:
    sizes = k.shape[1], v.shape[1], k.shape[2], v.shape[2]
    return state_layout(*sizes, k.dtype, device_type)


def _check_pages(k: Tensor, v: Tensor, pages: Sequence[Tensor], device_type: str) -> None:
    layout = _layout_of(k, v, device_type)
    for name, page, (shape, dtype) in zip(
        ("boundary", "keys", "updates", "decays"), pages, layout, strict=True
    ):
        if page.shape[1:] != shape:
            raise ValueError(f"{name} must be [slots, {list(shape)}], got {list(page.shape)}")
        if page.dtype != dtype:
            raise TypeError(f"the state's {name} must be {dtype}, got {page.dtype}")


@gated_delta_rule.register_kernel("cuda")
def _(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor) -> Tensor:
    from isomodels.kernels import gated_delta_triton

    _check(q, k, v, g, beta)
    return gated_delta_triton.gated_delta_rule(q, k, v, g, beta, cu_seqlens)


@paged_gated_delta_rule.register_kernel("cuda")
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    boundary: Tensor,
    keys: Tensor,
    updates: Tensor,
    decays: Tensor,
    slots: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    max_seqlen_q: int,
) -> Tensor:
    from isomodels.kernels import gated_delta_triton

    _check(q, k, v, g, beta)
    _check_pages(k, v, (boundary, keys, updates, decays), "cuda")
    pages = gated_delta_triton.Pages(boundary, keys, updates, decays, slots, seq_lens)
    return gated_delta_triton.paged_gated_delta_rule(
        q, k, v, g, beta, pages, cu_seqlens_q, max_seqlen_q
    )


@gated_delta_rule.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor) -> Tensor:
    return v.new_empty(v.shape)


@paged_gated_delta_rule.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    boundary: Tensor,
    keys: Tensor,
    updates: Tensor,
    decays: Tensor,
    slots: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    max_seqlen_q: int,
) -> Tensor:
    return v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple:
    from isomodels.kernels.gated_delta_backward import gated_delta_rule_backward

    return *gated_delta_rule_backward(grad, *ctx.saved_tensors), None


gated_delta_rule.register_autograd(_backward, setup_context=_setup_context)
