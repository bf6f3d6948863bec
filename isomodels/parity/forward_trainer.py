"""The trainer's side of `isomodels.parity.forward_only`, run in a process of its own."""

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from isomodels.config import DTYPES, read_config
from isomodels.megatron.degrees import Degrees
from isomodels.megatron.packing import Pack
from isomodels.megatron.process import start_process, stop_process
from isomodels.megatron.scoring import Scoring
from isomodels.parity.checkpoints import draw_weights
from isomodels.parity.trainer import ParityTrainer


class ForwardPasses(Scoring):
    """A Megatron model without gradients and optimizer, whose weights are drawn.

    Args:
        config_folder: has the config.json.
        dtype: torch.float32 or torch.bfloat16.
        seed: of the weights.
        max_tokens: most tokens of one microbatch.

    Raises:
        IsoError: for a config that cannot be used.
    """

    def __init__(self, config_folder: str, dtype: torch.dtype, seed: int, max_tokens: int):
        start_process()
        from isomodels.megatron.build import in_dtype
        from isomodels.megatron.provider import model_provider, transformer_config

        self.layout, self.recompute, self.max_tokens = Degrees(), False, max_tokens
        _, hf_config = read_config(config_folder)
        config = transformer_config(hf_config, params_dtype=dtype, calculate_per_token_loss=True)
        model = model_provider(config_folder, load_weights=False)(config=config)
        draw_weights(model.core, seed)
        self.models = [model]
        self.wrapped = [in_dtype(config, model)]

    def _run(self, packs: list[Pack], **options: Any) -> list[Tensor]:
        # "forward" runs with gradients to come, whose activations would not fit at full depth
        with saved_tensors_hooks(lambda _: None, _forgotten):
            return super()._run(packs, **{**options, "forward_only": True})

    def _drop_gradients(self) -> None:
        """There are none: nothing is kept for them."""

    def close(self) -> None:
        """Give back the process groups."""
        stop_process()


def _forgotten(_: Any) -> NoReturn:
    raise RuntimeError("a model of forward passes alone kept nothing for a backward pass")


class ForwardTrainer(ParityTrainer):
    """The trainer's side, by forward passes alone: with gradients to come, and without."""

    def __init__(self, config_folder: str, dtype: str, seed: int, max_tokens: int):
        self.trainer = ForwardPasses(config_folder, DTYPES[dtype], seed, max_tokens)
        self.contract_args = config_folder, DTYPES[dtype]
        self.count()
