"""Triton backend of latent attention: the arithmetic of one block of keys, shared by the tile
kernel (`mla_triton`) and the decode kernel (`mla_decode_triton`), and how keys reach it.

Keys are cut into segments and blocks, and a row is summed, merged and finished as in
`attention_triton`, with one key head; its value is the key's latent.

Mathematics: DeepSeek-AI, "DeepSeek-V2" (2024), appendix C; Dao et al., FlashAttention (2022).
"""

# mypy: disable-error-code="no-untyped-def"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

BLOCK = 64  # keys in one block: part of the schedule
_ONES = tl.constexpr(16)  # columns of the product that sums the rows; all equal


@triton.jit
def latent_block(
    q, q_rope, latent, k_rope, m, norm, acc, scale_log2, keys, positions, MASKED: tl.constexpr
):
    """One block of the online softmax.

    q [M, R], q_rope [M, P], latent [N, R], k_rope [N, P], keys [N], positions [M]; the state is
    the maximum m [M] (in powers of two), the sum norm [M, 16] (equal columns) and acc [M, R].
    """
    s = tl.dot(q, tl.trans(latent), input_precision="ieee")
    s = tl.dot(q_rope, tl.trans(k_rope), s, input_precision="ieee")
    if MASKED:
        s = tl.where(keys[None, :] <= positions[:, None], s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1) * scale_log2)
    base = m_new
    if MASKED:  # a row that has seen no key yet: no inf - inf
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(tl.fma(s, scale_log2, -base[:, None])).to(latent.dtype)
    alpha = tl.exp2(m - base)[:, None]
    # A sum over the tensor core does not follow the layout of threads; tl.sum would.
    ones = tl.full([latent.shape[0], _ONES], 1.0, tl.float32).to(latent.dtype)
    norm = tl.dot(p, ones, norm * alpha, input_precision="ieee")
    acc = tl.dot(p, latent, acc * alpha, input_precision="ieee")
    return m_new, norm, acc


@triton.jit
def walk_latents(
    q, q_rope, m, norm, acc, positions,
    latent_ptr, k_rope_ptr, latent_desc, k_rope_desc, first_row, block_table, length, first, last,
    scale_log2, stride_page, stride_row, stride_rope, PAGE: tl.constexpr, PAGED: tl.constexpr,
    TMA: tl.constexpr, N: tl.constexpr, R: tl.constexpr, P: tl.constexpr,
    WIDTH: tl.constexpr, ROPE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Blocks [first, last) of one segment. Without MASKED, all rows must see them whole (only
    these may come through tensor maps: past a sequence's end lies another one).

    WIDTH and ROPE are R and P padded to what a product takes.
    """
    dim = tl.arange(0, WIDTH)
    rope_dim = tl.arange(0, ROPE)
    for block in range(first, last):
        keys = block * N + tl.arange(0, N)
        if TMA and not MASKED:
            if PAGED:
                page = tl.load(block_table + block * N // PAGE)
                row = page * (stride_page // stride_row) + block * N % PAGE
            else:
                row = first_row + block * N
            latent = latent_desc.load([row, 0])
            k_rope = k_rope_desc.load([row, 0])
        else:
            if PAGED:
                page = tl.load(block_table + keys // PAGE, mask=keys < length, other=0)
                at = page.to(tl.int64) * stride_page + (keys % PAGE) * stride_row
                rope_at = at
            else:
                at = keys.to(tl.int64) * stride_row
                rope_at = keys.to(tl.int64) * stride_rope
            # A page's unused slots can hold NaN, and 0 * NaN is NaN.
            real = (keys < length)[:, None]
            latent_at = latent_ptr + at[:, None] + dim[None, :]
            k_rope_at = k_rope_ptr + rope_at[:, None] + rope_dim[None, :]
            if MASKED or WIDTH != R:
                latent = tl.load(latent_at, mask=real & (dim < R)[None, :], other=0.0)
            else:
                latent = tl.load(latent_at)
            if MASKED or ROPE != P:
                k_rope = tl.load(k_rope_at, mask=real & (rope_dim < P)[None, :], other=0.0)
            else:
                k_rope = tl.load(k_rope_at)
        m, norm, acc = latent_block(
            q, q_rope, latent, k_rope, m, norm, acc, scale_log2, keys, positions, MASKED
        )
    return m, norm, acc


@triton.jit
def empty_latents(M: tl.constexpr, WIDTH: tl.constexpr):
    """The state before any key."""
    m = tl.full([M], float("-inf"), tl.float32)
    return m, tl.zeros([M, _ONES], tl.float32), tl.zeros([M, WIDTH], tl.float32)


@triton.jit
def load_queries(
    q_ptr, q_rope_ptr, tokens, heads, valid, num_heads, stride_qt, stride_qh,
    R: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """Rows (token, head) of q_latent [T, heads, R], dense, and of q_rope [T, heads, P]."""
    dim = tl.arange(0, WIDTH)
    rope_dim = tl.arange(0, ROPE)
    at = (tokens * num_heads + heads)[:, None] * R + dim[None, :]
    q = tl.load(q_ptr + at, mask=valid[:, None] & (dim < R)[None, :], other=0.0)
    at = (tokens * stride_qt + heads * stride_qh)[:, None] + rope_dim[None, :]
    q_rope = tl.load(q_rope_ptr + at, mask=valid[:, None] & (rope_dim < P)[None, :], other=0.0)
    return q, q_rope


def check(q: Tensor, q_rope: Tensor, scale: float) -> None:
    """Refuse what the kernels do not have."""
    if q.dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"latent attention takes bfloat16 or float32, not {q.dtype}")
    rank, rope = q.shape[2], q_rope.shape[2]
    if rank > 512 or rope > 128:
        raise ValueError(
            f"latent attention has no kernel for latents of {rank} and rotated keys of {rope}: "
            "at most 512 and 128"
        )
    if not scale > 0:
        raise ValueError(f"the scale of attention scores must be positive, not {scale}")


def padded(size: int) -> int:
    """The least length of an axis that a product takes."""
    return max(16, triton.next_power_of_2(size))


def use_tma(x: Tensor) -> bool:
    """Whether rows of x [T, D] can come through a tensor map: a matter of speed alone."""
    return (
        x.stride(0) * x.element_size() % 16 == 0
        and x.data_ptr() % 16 == 0
        and x.shape[1] * x.element_size() >= 32
        and (not x.is_cuda or torch.cuda.get_device_capability(x.device) >= (9, 0))
    )


def tensor_map(x: Tensor) -> Any:
    """Blocks of rows of x [T, D], padded with zeros."""
    return TensorDescriptor(x, list(x.shape), [x.stride(0), 1], [BLOCK, padded(x.shape[1])])


def key_maps(latent: Tensor, k_rope: Tensor, wanted: bool = True) -> tuple[Any, Any]:
    """Tensor maps of latents [T, R] and rotated keys [T, P], or nothing."""
    wanted = wanted and latent.dtype == torch.bfloat16 and use_tma(latent) and use_tma(k_rope)
    return (tensor_map(latent), tensor_map(k_rope)) if wanted else (None, None)


def page_rows(latent_cache: Tensor) -> Tensor | None:
    """A cache [blocks, 1, block_size, R + P] as rows [slots, R + P], where a block of keys lies
    within one page and pages lie at a distance of whole slots: then tensor maps can read it."""
    stride_page, _, stride_row, _ = latent_cache.stride()
    page, width = latent_cache.shape[2:]
    if page % BLOCK or stride_page % stride_row or not len(latent_cache):
        return None
    slots = (len(latent_cache) - 1) * (stride_page // stride_row) + page
    return latent_cache.as_strided((slots, width), (stride_row, 1))
