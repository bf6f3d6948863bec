"""Triton backend of the backward of `isomodels::embedding`; the forward is torch's own copy."""

# Arguments of kernels have Triton's own types.
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from isomodels.kernels.common_triton import rows_of

_ROWS, _COLUMNS = 4, 2048


@triton.jit(do_not_specialize=["tokens"])
def _sum_segments(
    grad_ptr, order_ptr, sorted_ptr, out_ptr, tokens, width, stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The program at an id's first place in sorted order sums the gradients of all its tokens."""
    first = tl.program_id(0)
    token_id = tl.load(sorted_ptr + first)
    before = tl.load(sorted_ptr + first - 1, mask=first > 0, other=-1)
    if token_id != before:
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = columns < width
        total = tl.zeros((COLUMNS,), tl.float32)
        place = first
        more = True
        while more:
            places = place + tl.arange(0, ROWS)
            same = tl.load(sorted_ptr + places, mask=places < tokens, other=-1) == token_id
            rows = tl.load(order_ptr + places, mask=same, other=0)
            grad = tl.load(
                grad_ptr + rows[:, None] * stride + columns[None, :],
                mask=same[:, None] & inside[None, :],
                other=0.0,
            )
            total += tl.sum(grad.to(tl.float32), axis=0)
            place += ROWS
            more = tl.sum(same.to(tl.int32)) == ROWS
        out = out_ptr + token_id * width + columns
        tl.store(out, total.to(out_ptr.dtype.element_ty), mask=inside)


def embedding_backward(
    grad: Tensor, input_ids: Tensor, vocab_size: int, dtype: torch.dtype
) -> Tensor:
    """grad [T, H], input_ids [T] int64 -> [V, H] in `dtype`.

    The gradients of one id are summed in fp32 in the order of their tokens (a stable sort), without
    atomics.
    """
    grad = rows_of(grad)
    tokens, width = grad.shape
    out = torch.zeros(vocab_size, width, dtype=dtype, device=grad.device)
    if grad.numel():
        ids, order = torch.sort(input_ids, stable=True)
        _sum_segments[(tokens, triton.cdiv(width, _COLUMNS))](
            grad, order, ids, out, tokens, width, grad.stride(0),
            ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=8,
        )  # fmt: skip
    return out
