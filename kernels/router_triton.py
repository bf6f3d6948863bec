"""Triton backend of `isomodels::router_logits` and `isomodels::route`.

One program routes one token, with one warp. Floats are compared through integers of the same order,
which also put NaN first and tie zeros of both signs.
"""

# Arguments of kernels have Triton's own types.
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from isomodels.kernels.common_triton import log2_ceil, pairwise_sum
from isomodels.kernels.gemm_triton import Config, gemm
from isomodels.kernels.linear_triton import tuning
from isomodels.kernels.tensor_map_triton import cdiv

_LEAST = tl.constexpr(-(2**31))  # below the key of every number
_NAN = tl.constexpr(2**31 - 1)

# Tiles of the logits: for few rows; for many by experts, up to and including the key, so that one
# tile has all of them and the tokens are read once; for a gradient in fp32.
_FEW = {
    32: Config(16, 64, 256, 5, 4, 1, 1, 1, 0, 1, 1),
    512: Config(64, 32, 128, 6, 4, 0, 1, 1, 0, 1, 1),
}
_MANY = {
    64: Config(64, 64, 128, 5, 4, 0, 1, 1, 0, 1, 1),
    128: Config(64, 128, 128, 4, 4, 0, 2, 1, 0, 1, 1),
    1 << 30: Config(64, 256, 64, 4, 4, 0, 2, 1, 0, 1, 1),
}
_WEIGHT_GRADIENT = Config(128, 128, 64, 4, 8, 0, 2)


@triton.jit
def _key(x):
    """fp32 -> int32 of the same order."""
    bits = x.to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(x != x, _NAN, tl.where(x == 0.0, 0, key))


@triton.jit
def _number(key):
    """The fp32 of a key, with zeros positive."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _sigmoid(x):
    return tl.div_rn(1.0, 1.0 + tl.exp(-x))


@triton.jit
def _columns(EACH: tl.constexpr, EACH_WIDTH: tl.constexpr, WIDTH: tl.constexpr):
    """The expert of each of WIDTH columns, groups padded to EACH_WIDTH, and whether it exists."""
    column = tl.arange(0, WIDTH)
    inside = column % EACH_WIDTH
    return (column // EACH_WIDTH) * EACH + inside, inside < EACH


@triton.jit
def _keep_groups(
    key, GROUPS: tl.constexpr, GROUPS_WIDTH: tl.constexpr, KEPT: tl.constexpr,
    EACH_WIDTH: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Only the keys of the best KEPT groups, by the sum of their two highest scores."""
    key = tl.reshape(key, (GROUPS_WIDTH, EACH_WIDTH))
    inside = tl.arange(0, EACH_WIDTH)[None, :]
    best = tl.max(key, axis=1)
    at = tl.min(tl.where(key == best[:, None], inside, EACH_WIDTH), axis=1)
    second = tl.max(tl.where(inside == at[:, None], _LEAST, key), axis=1)
    group = tl.arange(0, GROUPS_WIDTH)
    score = tl.where(group < GROUPS, _key(_number(best) + _number(second)), _LEAST)
    kept = tl.zeros((GROUPS_WIDTH,), tl.int32)
    for _ in tl.static_range(KEPT):
        first = tl.min(tl.where(score == tl.max(score, axis=0), group, GROUPS_WIDTH), axis=0)
        kept = tl.where(group == first, 1, kept)
        score = tl.where(group == first, _LEAST, score)
    return tl.reshape(tl.where(kept[:, None] == 1, key, _LEAST), (WIDTH,))


@triton.jit
def _scores(x, real, SIGMOID: tl.constexpr):
    """The numerators of all experts of a token: sigmoids, or exponentials less the maximum's."""
    if SIGMOID:
        score = _sigmoid(x)
    else:
        score = tl.exp(x - _number(tl.max(tl.where(real, _key(x), _LEAST), axis=0)))
    return tl.where(real, score, 0.0)


@triton.jit
def _route(
    logits_ptr, bias_ptr, replay_ptr, weights_ptr, ids_ptr, pitch, scale,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr, SIGMOID: tl.constexpr,
    NORMALIZE: tl.constexpr, BIAS: tl.constexpr, REPLAY: tl.constexpr, GROUPS: tl.constexpr,
    GROUPS_WIDTH: tl.constexpr, KEPT: tl.constexpr, EACH: tl.constexpr,
    EACH_WIDTH: tl.constexpr, WIDTH: tl.constexpr, LOG2: tl.constexpr,
):  # fmt: skip
    """Ids and weights of one token."""
    row = tl.program_id(0).to(tl.int64)
    expert, real = _columns(EACH, EACH_WIDTH, WIDTH)
    real = real & (expert < EXPERTS)
    x = tl.load(logits_ptr + row * pitch + expert, mask=real, other=0.0)
    score = _scores(x, real, SIGMOID)
    choice = x
    if SIGMOID:
        choice = score
    if BIAS:
        choice = score + tl.load(bias_ptr + expert, mask=real, other=0.0)
    key = tl.where(real, _key(choice), _LEAST)
    if GROUPS > 1:
        key = _keep_groups(key, GROUPS, GROUPS_WIDTH, KEPT, EACH_WIDTH, WIDTH)
    slots = tl.arange(0, SLOTS)
    chosen = tl.zeros((SLOTS,), tl.float32)
    total = 1.0
    for slot in tl.static_range(TOP_K):
        if REPLAY:
            given = tl.load(replay_ptr + row * TOP_K + slot)
            one = tl.minimum(tl.maximum(given, 0), EXPERTS - 1)
            value = tl.sum(tl.where(expert == one, score, 0.0), axis=0)
            # As a logit that is NaN: an id out of range is not hidden.
            value = tl.where(one == given, value, float("nan"))
        else:
            # Padded groups keep the experts' order, so the first column is the lowest index.
            one = tl.min(tl.where(key == tl.max(key, axis=0), expert, EXPERTS), axis=0)
            key = tl.where(expert == one, _LEAST, key)
            value = tl.sum(tl.where((expert == one) & real, score, 0.0), axis=0)
        tl.store(ids_ptr + row * TOP_K + slot, one)
        chosen = tl.where(slots == slot, value, chosen)
        if NORMALIZE:
            total = value if slot == 0 else total + value
    if NORMALIZE:
        if SIGMOID:
            total += 1e-20
    elif not SIGMOID:
        total = tl.sum(pairwise_sum(tl.reshape(score, (1, WIDTH)), 1, LOG2))
    weights = tl.div_rn(chosen, total) * scale
    tl.store(weights_ptr + row * TOP_K + slots, weights, mask=slots < TOP_K)


@triton.jit
def _route_backward(
    grad_ptr, logits_ptr, ids_ptr, out_ptr, pitch, scale,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Gradient of one token's logits from those of its weights."""
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, WIDTH)
    real = expert < EXPERTS
    x = tl.load(logits_ptr + row * pitch + expert, mask=real, other=0.0)
    score = _scores(x, real, SIGMOID)
    grad = tl.zeros((WIDTH,), tl.float32)  # of the chosen, where they lie
    chosen = tl.zeros((WIDTH,), tl.int32)
    for slot in tl.static_range(TOP_K):
        one = tl.load(ids_ptr + row * TOP_K + slot)
        grad = tl.where(expert == one, tl.load(grad_ptr + row * TOP_K + slot) * scale, grad)
        chosen = tl.where(expert == one, 1, chosen)
    kept = tl.where(chosen == 1, score, 0.0)
    if NORMALIZE:
        total = tl.sum(kept, axis=0)
        if SIGMOID:
            total += 1e-20
        # d(s_i / sum s) = (ds_i - w_i * sum of ds) / sum s
        grad -= tl.sum(grad * kept, axis=0) / total
    elif SIGMOID:
        total = 1.0
    else:
        total = tl.sum(score, axis=0)
    out = grad / total * kept
    if SIGMOID:
        out = out * (1.0 - kept)
    elif not NORMALIZE:
        out -= score / total * tl.sum(out, axis=0)
    tl.store(out_ptr + row * EXPERTS + expert, out, mask=real)


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, H] W^T, W [E, H] -> [T, E] fp32, not rounded."""
    rows, experts = len(x), len(weight)
    config = tuning("nt", x, rows, *weight.shape)
    if x.dtype != torch.float32:
        table, size = (_FEW, rows) if rows <= max(_FEW) else (_MANY, experts)
        config = next(table[limit] for limit in sorted(table) if size <= limit)
    # Rows that bulk copies can write
    out = torch.empty(rows, cdiv(experts, 4) * 4, dtype=torch.float32, device=x.device)
    out = gemm(x, weight, config, out_dtype=torch.float32, out=out[:, :experts])
    return out.contiguous()


def _parts(x: Tensor) -> list[Tensor]:
    """x fp32 as three bf16 whose sum it is: products with bf16 are then exact."""
    parts = []
    for _ in range(3):
        parts.append(x.bfloat16())
        x = x - parts[-1].float()
    return parts


def logits_backward(
    grad: Tensor, x: Tensor, weight: Tensor, needs_x: bool, needs_weight: bool
) -> tuple[Tensor, Tensor]:
    """(dx [T, H], dweight [E, H]) of grad [T, E] fp32; of no elements where not asked for."""
    dx, dweight = x.new_empty(0), weight.new_empty(0)
    rows, experts, hidden = len(x), *weight.shape
    parts = [grad] if x.dtype == torch.float32 else _parts(grad)
    if needs_x:
        several = torch.cat(parts, 1)  # [T, parts * E]
        weights = weight.repeat(len(parts), 1)
        config = tuning("nn", x, rows, hidden, len(weights))
        dx = gemm(several, weights, config, out_dtype=x.dtype, b_t=True)
    if needs_weight:
        several = torch.cat(parts, 1)
        config = tuning("tn", x, several.shape[1], hidden, rows)
        if x.dtype != torch.float32:  # whose result is an fp32 one
            config = _WEIGHT_GRADIENT
        sums = gemm(several, x, config, out_dtype=torch.float32, a_t=True, b_t=True)
        sums = sums.view(len(parts), experts, hidden)
        total = sums[0]
        for one in sums[1:]:
            total = total + one
        dweight = total.to(weight.dtype)
    return dx, dweight


def route(
    logits: Tensor, top_k: int, scoring: str, normalize: bool, scale: float, bias: Tensor | None,
    n_group: int, topk_group: int, replay: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(weights [T, k] fp32, ids [T, k] int32); arguments as in `router.py`."""
    logits = logits.contiguous()
    rows, experts = logits.shape
    weights = torch.empty(rows, top_k, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, top_k, dtype=torch.int32, device=logits.device)
    if rows == 0:
        return weights, ids
    each = experts // n_group
    each_width, groups_width = 1 << log2_ceil(each), 1 << log2_ceil(n_group)
    width = each_width * groups_width
    _route[(rows,)](
        logits, weights if bias is None else bias.contiguous(),
        ids if replay is None else replay.contiguous(), weights, ids, logits.stride(0), scale,
        EXPERTS=experts, TOP_K=top_k, SLOTS=1 << log2_ceil(top_k), SIGMOID=scoring == "sigmoid",
        NORMALIZE=normalize, BIAS=bias is not None, REPLAY=replay is not None, GROUPS=n_group,
        GROUPS_WIDTH=groups_width, KEPT=topk_group, EACH=each, EACH_WIDTH=each_width,
        WIDTH=width, LOG2=log2_ceil(width), num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return weights, ids


def route_backward(
    grad: Tensor, logits: Tensor, ids: Tensor, scoring: str, normalize: bool, scale: float
) -> Tensor:
    """grad [T, k] fp32 of the weights -> [T, E] fp32 of the logits."""
    logits, grad = logits.contiguous(), grad.contiguous()
    rows, experts = logits.shape
    out = torch.empty_like(logits)
    if rows:
        _route_backward[(rows,)](
            grad, logits, ids.contiguous(), out, logits.stride(0), scale,
            EXPERTS=experts, TOP_K=ids.shape[1], SIGMOID=scoring == "sigmoid",
            NORMALIZE=normalize, WIDTH=1 << log2_ceil(experts), num_warps=1,
        )  # fmt: skip
    return out
