"""Block-scaled float8 weights, the form in which DeepSeek-V3 is published, read as plain tensors.

A matrix is float8_e4m3fn, and `NAME_scale_inv` holds one fp32 factor for each block of it. The
value is their product; a cast of the matrix alone would give noise.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from isomodels.errors import CheckpointError
from isomodels.weights_conv.bits import shorten
from isomodels.weights_conv.files import TensorFiles

FLOAT8 = torch.float8_e4m3fn
SCALE = "_scale_inv"


class Dequantised(TensorFiles):
    """The tensors of a folder, float8 ones multiplied by their scales when they are read.

    Scales are no entries of their own; those without a float8 tensor are left for the check of
    names to find.

    Args:
        files: the folder.
        block: rows and columns of a block.
        dtype: of the products.

    Raises:
        CheckpointError: naming each float8 tensor without scales, or whose scales do not fit it.
    """

    def __init__(self, files: TensorFiles, block: tuple[int, int], dtype: torch.dtype):
        meta = files.meta()
        self.block, self.dtype = block, dtype
        self.scaled = {name for name, tensor in meta.items() if tensor.dtype == FLOAT8}
        _check_scales(meta, self.scaled, block)
        scales = {name + SCALE for name in self.scaled}
        kept = {name: file for name, file in files.weight_map.items() if name not in scales}
        super().__init__(files.path, files._files, kept, files.index_metadata)
        self.stored = files

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.scaled:
            return self.stored[name]
        return dequantise(self.stored[name], self.stored[name + SCALE], self.block, self.dtype)

    def meta(self) -> dict[str, Tensor]:
        """Every tensor's shape and its dtype once read, as meta tensors."""
        found = self.stored.meta()
        return {
            name: found[name].to(self.dtype) if name in self.scaled else found[name]
            for name in self.weight_map
        }


def dequantise(
    weight: Tensor, scale_inv: Tensor, block: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    """weight times the scale of its block, in fp32, rounded once.

    Args:
        weight: [N, K] float8_e4m3fn.
        scale_inv: [ceil(N / block[0]), ceil(K / block[1])] fp32.
        block: rows and columns that share a scale.
        dtype: of the result.

    Returns:
        [N, K] in `dtype`.
    """
    rows, columns = weight.shape
    # no more than there are: a config may state blocks of any size
    scales = scale_inv.repeat_interleave(min(block[0], rows), 0)[:rows]
    scales = scales.repeat_interleave(min(block[1], columns), 1)[:, :columns]
    return (weight.float() * scales).to(dtype)


def _check_scales(meta: Mapping[str, Tensor], scaled: set[str], block: tuple[int, int]) -> None:
    lacking = [name for name in scaled if name + SCALE not in meta]
    if lacking:
        raise CheckpointError(
            f"float8 weights without their scales (NAME{SCALE}): {shorten(lacking)}; a cast alone "
            "would give other numbers: copy the files again"
        )
    wrong = []
    for name in scaled:
        shape, scale = meta[name].shape, meta[name + SCALE]
        expected = [-(-size // by) for size, by in zip(shape, block, strict=False)]
        if len(shape) != 2 or list(scale.shape) != expected or scale.dtype != torch.float32:
            wrong.append(f"{name} {list(shape)} with {list(scale.shape)} in {scale.dtype}")
    if wrong:
        raise CheckpointError(
            f"float8 matrices need float32 scales of one a block of {block[0]} x {block[1]}: "
            f"{shorten(wrong)}"
        )
