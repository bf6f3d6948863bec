"""YaRN: rotary positions beyond the length a model was trained on, as tables for `isomodels::rope`.

Mathematics: Peng et al., "YaRN: Efficient Context Window Extension" (2023), in the form of
DeepSeek-V2 and V3 with two mscale values: the ratio of their factors scales cosines and sines, and
the square of the second scales the softmax. Frequencies are computed in fp32, as in transformers'
`modeling_rope_utils.py`.
"""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from isomodels.kernels.fixed_order import one_thread
from isomodels.kernels.rope import rope_table


@dataclass(frozen=True)
class Yarn:
    """The constants of a config's `rope_scaling`.

    Attributes:
        factor: how much longer than in training a sequence may be.
        original_max_position_embeddings: longest sequence of the training.
        beta_fast, beta_slow: rotations over that length above which a frequency is kept, and
            below which it is divided by `factor`; between them it is blended.
        mscale, mscale_all_dim: weights of log(factor) in the two attention factors; 0 for none.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float

    @property
    def table_factor(self) -> float:
        """Factor of cosines and sines, of the query's and of the key's rotary part."""
        if self.mscale and self.mscale_all_dim:
            return self._factor(self.mscale) / self._factor(self.mscale_all_dim)
        return self._factor(1.0)

    @property
    def softmax_factor(self) -> float:
        """Factor of all scores."""
        return self._factor(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def _factor(self, mscale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0

    def _dimension(self, rotations: float, dim: int, theta: float) -> float:
        """Index of the frequency that turns so often over the length of the training."""
        turns = self.original_max_position_embeddings / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(theta))

    def frequencies(self, dim: int, theta: float) -> Tensor:
        """Radians a position, [dim / 2] fp32."""
        exponents = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim
        periods = theta**exponents
        low = max(math.floor(self._dimension(self.beta_fast, dim, theta)), 0)
        high = min(math.ceil(self._dimension(self.beta_slow, dim, theta)), dim - 1)
        width = high - low if high != low else 0.001
        ramp = torch.arange(dim // 2, dtype=torch.float32, device="cpu")
        kept = 1.0 - torch.clamp((ramp - low) / width, 0, 1)
        return 1.0 / (self.factor * periods) * (1.0 - kept) + 1.0 / periods * kept


@functools.lru_cache(maxsize=8)
def yarn_table(
    dim: int,
    theta: float,
    max_positions: int,
    yarn: Yarn | None,
    device: torch.device | None = None,
) -> Tensor:
    """Cosines and sines for every position; those of `rope_table` without `yarn`.

    Angles are fp32 position times fp32 frequency; cosine, sine and their factor are taken in fp64
    and rounded once. Not a buffer of any module: hosts cast buffers to the model dtype.

    Returns:
        [max_positions, dim] fp32; the first half cosines, the second half sines.
    """
    if yarn is None:
        return rope_table(dim, theta, max_positions, device)
    # A table first made while scoring in inference mode must serve training later.
    with one_thread(), torch.inference_mode(False):
        positions = torch.arange(max_positions, dtype=torch.float32, device="cpu")
        angles = (positions[:, None] * yarn.frequencies(dim, theta)).double()  # [P, D/2]
        waves = torch.cat((angles.cos(), angles.sin()), dim=1)
        # Made on the CPU wherever it is used: one table for every device.
        return (waves * yarn.table_factor).float().to(device)
