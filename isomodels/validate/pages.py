"""An engine's pages around packed keys and values: random order, NaN wherever nobody wrote."""

import torch
from torch import Tensor


def permuted_empty(
    *shape: int, order: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Tensor:
    """A NaN-filled tensor whose dimensions lie in memory in another order, outermost first."""
    storage = torch.full([shape[d] for d in order], torch.nan, dtype=dtype, device=device)
    inverse = [order.index(d) for d in range(len(shape))]
    return storage.permute(inverse)


class Pages:
    """Room for sequences of given lengths.

    Args:
        lengths: of the sequences.
        kv_heads, head_dim, dtype: of keys and values.
        block_size: slots of a page.
        order: how [block, head, slot, channel] lie in memory, outermost first.
        seed: of the order of pages.
        device: of cache and table.

    Attributes:
        cache: [blocks, kv_heads, block_size, 2 * head_dim], all NaN.
        block_table: [sequences, blocks + 1] int32; entries past a sequence's end name a page
            that nobody writes.
    """

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
        device: torch.device | str = "cpu",
    ):
        counts = [-(-length // block_size) for length in lengths]
        total = sum(counts) + 3
        generator = torch.Generator("cpu").manual_seed(seed)
        free = torch.randperm(total, generator=generator, device="cpu").tolist()
        self.block_size = block_size
        self.cache = permuted_empty(
            total, kv_heads, block_size, 2 * head_dim, order=order, dtype=dtype, device=device
        )
        unused = free.pop()  # a page of NaN stands where a table has no entry
        table = [[unused] * (max([*counts, 1]) + 1) for _ in lengths]
        for row, count in zip(table, counts, strict=True):
            row[:count] = [free.pop() for _ in range(count)]
        self.block_table = torch.tensor(table, dtype=torch.int32, device=device)

    def slots(self, sequence: int, start: int, end: int) -> Tensor:
        """Slot of each position from start to end: [end - start] int64."""
        positions = torch.arange(start, end, device=self.block_table.device)
        blocks = self.block_table[sequence, positions // self.block_size].long()
        return blocks * self.block_size + positions % self.block_size
