"""An engine's pages around packed keys and values: random order, NaN wherever nobody wrote."""

import torch
from torch import Tensor


def permuted_empty(*shape: int, order: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A NaN-filled tensor whose dimensions lie in memory in another order, outermost first."""
    storage = torch.full([shape[d] for d in order], torch.nan, dtype=dtype)
    inverse = [order.index(d) for d in range(len(shape))]
    return storage.permute(inverse)


class Pages:
    """Room for sequences of `lengths`; `order`: [block, head, slot, channel] in memory."""

    def __init__(
        self,
        lengths: list[int],
        kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
        *,
        order: tuple[int, ...] = (0, 1, 2, 3),
        seed: int = 0,
    ):
        counts = [-(-length // block_size) for length in lengths]
        total = sum(counts) + 3
        generator = torch.Generator().manual_seed(seed)
        free = torch.randperm(total, generator=generator).tolist()
        self.block_size = block_size
        self.cache = permuted_empty(
            total, kv_heads, block_size, 2 * head_dim, order=order, dtype=dtype
        )
        unused = free.pop()  # a page of NaN stands where a table has no entry
        self.block_table = torch.full(
            (len(lengths), max([*counts, 1]) + 1), unused, dtype=torch.int32
        )
        for row, count in zip(self.block_table, counts, strict=True):
            row[:count] = torch.tensor([free.pop() for _ in range(count)], dtype=torch.int32)

    def slots(self, sequence: int, start: int, end: int) -> Tensor:
        """Slot of each position from start to end: [end - start] int64."""
        positions = torch.arange(start, end)
        blocks = self.block_table[sequence, positions // self.block_size].long()
        return blocks * self.block_size + positions % self.block_size
