"""Multi-head latent attention over packed sequences (`isomodels::mla_attention`) and over a paged
latent cache (`isomodels::paged_mla_attention`), with one definition for both: the absorbed form.

A token's history is one row of R + P numbers, shared by all heads: the normed latent c and the
rotated key k_rope. W_UK [nope, R] and W_UV [V, R] of a head are views of `kv_b`; the two are never
multiplied with another weight beforehand. For a head of a query row:

    q_latent = q_nope W_UK                       [R], fp32, rounded to the model dtype
    score    = ([q_latent | q_rope] . [c | k_rope]) * scale, one fp32 sum over R + P
    latent   = softmax(score) c                  [R], fp32, rounded to the model dtype
    out      = latent W_UV^T                     [V], fp32, rounded to the model dtype

Scores and softmax are those of `isomodels.kernels.attention.attend` with one key head, whose
values are the first R numbers of its keys. A form that reads K and V expanded from the latent
rounds differently, and a decode could only follow it by expanding its whole history for every
token, so this form serves all cases. The backward expands K and V: its bits are not promised.

Mathematics: DeepSeek-AI, "DeepSeek-V2" (2024), section 2.1 and appendix C.
"""

import itertools
from typing import Any

import torch
from torch import Tensor

from isomodels.kernels.attention import SCHEDULE as DENSE_SCHEDULE
from isomodels.kernels.attention import TRITON_SCHEDULE as DENSE_TRITON_SCHEDULE
from isomodels.kernels.attention import attend, page_places
from isomodels.kernels.fixed_order import matmul_nt, one_thread, round_up
from isomodels.kernels.schedule import Schedule, declare

_CONSTANTS: dict[str, int | str] = {
    **DENSE_SCHEDULE.constants,
    "form": "absorbed",
    "score_sum": "latent, then rope, in one pass",
    "query_latent": "rounded to the model dtype",
    "output_latent": "rounded to the model dtype",
}
SCHEDULE = declare(Schedule("mla_attention", "torch", 1, _CONSTANTS))
PAGED_SCHEDULE = declare(Schedule("paged_mla_attention", "torch", 1, _CONSTANTS))
WRITE_SCHEDULE = declare(Schedule("write_latent_cache", "torch", 1))

_TRITON_CONSTANTS: dict[str, int | str] = {
    **DENSE_TRITON_SCHEDULE.constants,
    **{name: _CONSTANTS[name] for name in ("form", "query_latent", "output_latent")},
    "score_sum": "latent, then rope, on one accumulator",
}
TRITON_SCHEDULE = declare(Schedule("mla_attention", "triton", 1, _TRITON_CONSTANTS))
TRITON_PAGED_SCHEDULE = declare(Schedule("paged_mla_attention", "triton", 1, _TRITON_CONSTANTS))
TRITON_WRITE_SCHEDULE = declare(Schedule("write_latent_cache", "triton", 1))


@torch.library.custom_op("isomodels::mla_attention", mutates_args=(), device_types="cpu")
def mla_attention(
    q_nope: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    kv_b: Tensor,
    cu_seqlens: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Causal attention of whole sequences, packed along the token axis.

    Args:
        q_nope: [T, num_heads, nope], float32 or bfloat16.
        q_rope: [T, num_heads, P], rotated.
        latent: [T, R], normed.
        k_rope: [T, P], rotated; one for all heads.
        kv_b: [num_heads * (nope + V), R]; rows of a head: W_UK, then W_UV.
        cu_seqlens: [num_seqs + 1] int32; sequence i holds tokens cu_seqlens[i] to cu_seqlens[i+1].
        scale: factor of the scores.

    Returns:
        (output [T, num_heads, V] in the dtype of `q_nope`,
        log-sum-exp of the scores [T, num_heads] fp32).

    Raises:
        ValueError: naming shapes that do not fit.
        TypeError: naming dtypes that differ.
    """
    _check("mla_attention", q_nope, q_rope, kv_b, latent, k_rope)
    w_uk, w_uv = split_kv_b(kv_b, q_nope)
    keys = torch.cat((latent, k_rope), 1).unsqueeze(1)  # [T, 1, R + P]
    lse = torch.empty(q_nope.shape[:2], dtype=torch.float32)
    with one_thread():
        q = _absorb(q_nope, q_rope, w_uk)
        mixed = q.new_empty(*q.shape[:2], latent.shape[1])  # [T, heads, R]
        for start, end in itertools.pairwise(cu_seqlens.tolist()):
            if end > start:
                rows = slice(start, end)
                values = keys[rows, :, : latent.shape[1]]
                mixed[rows], lse[rows] = attend(q[rows], keys[rows], values, scale)
        return _expand(mixed, w_uv), lse


@torch.library.custom_op("isomodels::paged_mla_attention", mutates_args=(), device_types="cpu")
def paged_mla_attention(
    q_nope: Tensor,
    q_rope: Tensor,
    latent_cache: Tensor,
    kv_b: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    scale: float,
    max_seqlen_q: int,
    max_seqlen_k: int,
) -> Tensor:
    """Causal attention of the newest tokens of each sequence over its cached latents.

    Args:
        q_nope, q_rope, kv_b, scale: as in `mla_attention`.
        latent_cache: [num_blocks, 1, block_size, R + P], latent then k_rope, any strides; holds
            the new tokens too. Slots past a sequence's length are never read.
        block_table: [num_seqs, max_blocks] int32.
        cu_seqlens_q: [num_seqs + 1] int32 bounds of the new tokens in the token axis.
        seq_lens: [num_seqs] int32 lengths including the new tokens.
        max_seqlen_q, max_seqlen_k: upper bounds of the new tokens and of the length of a
            sequence, known to the host: they size launches and cannot move a bit.

    Returns:
        [T, num_heads, V] in the dtype of `q_nope`; rows of no sequence are zero.

    Raises:
        ValueError: naming shapes that do not fit.
        TypeError: naming dtypes that differ.
    """
    _check("paged_mla_attention", q_nope, q_rope, kv_b, latent_cache)
    w_uk, w_uv = split_kv_b(kv_b, q_nope)
    rank, block_size = kv_b.shape[1], latent_cache.shape[2]
    bounds = cu_seqlens_q.tolist()
    with one_thread():
        q = _absorb(q_nope, q_rope, w_uk)
        mixed = q.new_zeros(*q.shape[:2], rank)  # [T, heads, R]
        for i, length in enumerate(seq_lens.tolist()):
            rows = slice(bounds[i], bounds[i + 1])
            if rows.stop == rows.start:
                continue
            blocks = block_table[i, : round_up(length, block_size) // block_size].long()
            # [blocks, 1, block_size, R + P] -> [length, 1, R + P]
            keys = latent_cache[blocks].transpose(1, 2).flatten(0, 1)[:length]
            mixed[rows], _ = attend(q[rows], keys, keys[..., :rank], scale)
        return _expand(mixed, w_uv)


@torch.library.custom_op(
    "isomodels::write_latent_cache", mutates_args=("latent_cache",), device_types="cpu"
)
def write_latent_cache(
    latent: Tensor, k_rope: Tensor, latent_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Put new latents and rotated keys into their pages: a copy, no arithmetic.

    Args:
        latent: [T, R].
        k_rope: [T, P].
        latent_cache: [num_blocks, 1, block_size, R + P], dtype of `latent`; changed.
        slot_mapping: [T] int64, block * block_size + offset, or -1 for a row that is padding.

    Raises:
        ValueError: naming shapes that do not fit.
        TypeError: where the cache has another dtype.
    """
    _check_cache(latent, k_rope, latent_cache)
    rows, blocks, offsets = page_places(slot_mapping, latent_cache.shape[2])
    latent_cache[blocks, 0, offsets, : latent.shape[1]] = latent[rows]
    latent_cache[blocks, 0, offsets, latent.shape[1] :] = k_rope[rows]


def _check_cache(latent: Tensor, k_rope: Tensor, latent_cache: Tensor) -> None:
    width = latent.shape[1] + k_rope.shape[1]
    if latent_cache.dim() != 4 or latent_cache.shape[1] != 1 or latent_cache.shape[3] != width:
        raise ValueError(
            f"a latent cache is [num_blocks, 1, block_size, {width}] for latents of "
            f"{latent.shape[1]} and keys of {k_rope.shape[1]}, got {list(latent_cache.shape)}"
        )
    if latent_cache.dtype != latent.dtype:
        raise TypeError(
            f"the latent cache holds {latent_cache.dtype}, the model computes {latent.dtype}"
        )


def _check(operation: str, q_nope: Tensor, q_rope: Tensor, kv_b: Tensor, *keys: Tensor) -> None:
    """Refuses operands that do not fit; `keys` are latent and k_rope, or the cache of both."""
    shapes = ", ".join(str(list(x.shape)) for x in (q_nope, q_rope, kv_b, *keys))
    fits = (
        q_nope.dim() == q_rope.dim() == 3
        and q_nope.shape[:2] == q_rope.shape[:2]
        and kv_b.dim() == 2
        and kv_b.shape[0] % q_nope.shape[1] == 0
        and kv_b.shape[0] // q_nope.shape[1] > q_nope.shape[2]
    )
    if fits and len(keys) == 2:
        rows, width = [x.shape[0] for x in keys], sum(x.shape[1] for x in keys)
        fits = rows == [len(q_nope)] * 2 and keys[0].shape[1] == kv_b.shape[1]
    elif fits:
        fits, width = keys[0].dim() == 4 and keys[0].shape[1] == 1, keys[0].shape[-1]
    if not fits or width != kv_b.shape[1] + q_rope.shape[2]:
        raise ValueError(
            f"{operation} needs q_nope [T, heads, nope], q_rope [T, heads, P], "
            "kv_b [heads * (nope + V), R] and latent [T, R] with k_rope [T, P], or a cache "
            f"[blocks, 1, block_size, R + P]; got {shapes}"
        )
    if {x.dtype for x in (q_rope, kv_b, *keys)} != {q_nope.dtype}:
        raise TypeError(
            f"{operation} needs one dtype, got "
            + ", ".join(str(x.dtype) for x in (q_nope, q_rope, kv_b, *keys))
        )


def split_kv_b(kv_b: Tensor, q_nope: Tensor) -> tuple[Tensor, Tensor]:
    """kv_b [heads * (nope + V), R] -> views W_UK [heads, nope, R] and W_UV [heads, V, R]."""
    _, num_heads, nope = q_nope.shape
    heads = kv_b.view(num_heads, -1, kv_b.shape[1])
    return heads[:, :nope], heads[:, nope:]


def _absorb(q_nope: Tensor, q_rope: Tensor, w_uk: Tensor) -> Tensor:
    """q_nope [T, heads, nope], q_rope [T, heads, P] -> [T, heads, R + P] in their dtype."""
    q = q_nope.new_empty(*q_nope.shape[:2], w_uk.shape[2] + q_rope.shape[2])
    for head, weight in enumerate(w_uk.unbind()):
        q[:, head, : w_uk.shape[2]] = matmul_nt(q_nope[:, head], weight.t())
    q[..., w_uk.shape[2] :] = q_rope
    return q


def _expand(mixed: Tensor, w_uv: Tensor) -> Tensor:
    """[T, heads, R] -> [T, heads, V] in its dtype."""
    out = mixed.new_empty(*mixed.shape[:2], w_uv.shape[1])
    for head, weight in enumerate(w_uv.unbind()):
        out[:, head] = matmul_nt(mixed[:, head], weight)
    return out


@mla_attention.register_kernel("cuda")
def _(
    q_nope: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    kv_b: Tensor,
    cu_seqlens: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    from isomodels.kernels import mla_heads_triton, mla_triton

    _check("mla_attention", q_nope, q_rope, kv_b, latent, k_rope)
    w_uk, w_uv = split_kv_b(kv_b, q_nope)
    q = mla_heads_triton.heads_product(q_nope, w_uk)
    mixed, lse = mla_triton.mla_attention(q, q_rope, latent, k_rope, cu_seqlens, scale)
    return mla_heads_triton.heads_product(mixed, w_uv.transpose(1, 2)), lse


@paged_mla_attention.register_kernel("cuda")
def _(
    q_nope: Tensor,
    q_rope: Tensor,
    latent_cache: Tensor,
    kv_b: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    scale: float,
    max_seqlen_q: int,
    max_seqlen_k: int,
) -> Tensor:
    from isomodels.kernels import mla_decode_triton, mla_heads_triton

    _check("paged_mla_attention", q_nope, q_rope, kv_b, latent_cache)
    w_uk, w_uv = split_kv_b(kv_b, q_nope)
    q = mla_heads_triton.heads_product(q_nope, w_uk)
    pages = (latent_cache, block_table, cu_seqlens_q, seq_lens)
    mixed = mla_decode_triton.paged_mla_attention(
        q, q_rope, *pages, scale, max_seqlen_q, max_seqlen_k
    )
    return mla_heads_triton.heads_product(mixed, w_uv.transpose(1, 2))


@write_latent_cache.register_kernel("cuda")
def _(latent: Tensor, k_rope: Tensor, latent_cache: Tensor, slot_mapping: Tensor) -> None:
    from isomodels.kernels import mla_decode_triton

    _check_cache(latent, k_rope, latent_cache)
    mla_decode_triton.write_latent_cache(latent, k_rope, latent_cache, slot_mapping)


@mla_attention.register_fake
def _(
    q_nope: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    kv_b: Tensor,
    cu_seqlens: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    return _empty_output(q_nope, kv_b), q_nope.new_empty(q_nope.shape[:2], dtype=torch.float32)


@paged_mla_attention.register_fake
def _(
    q_nope: Tensor,
    q_rope: Tensor,
    latent_cache: Tensor,
    kv_b: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    scale: float,
    max_seqlen_q: int,
    max_seqlen_k: int,
) -> Tensor:
    return _empty_output(q_nope, kv_b)


@write_latent_cache.register_fake
def _(latent: Tensor, k_rope: Tensor, latent_cache: Tensor, slot_mapping: Tensor) -> None:
    return None


def _empty_output(q_nope: Tensor, kv_b: Tensor) -> Tensor:
    tokens, heads, nope = q_nope.shape
    return q_nope.new_empty(tokens, heads, kv_b.shape[0] // heads - nope)


def _setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
    *tensors, ctx.scale = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple:
    from isomodels.kernels.mla_backward import mla_attention_backward

    return *mla_attention_backward(grad, *ctx.saved_tensors, ctx.scale), None, None


mla_attention.register_autograd(_backward, setup_context=_setup_context)
