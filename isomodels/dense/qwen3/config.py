"""config.json of Qwen3 dense models."""

from typing import Literal

from isomodels.config import DenseConfig


class Qwen3Config(DenseConfig):
    """Qwen3: no biases, RMSNorm over each query and key head."""

    attention_bias: Literal[False]
