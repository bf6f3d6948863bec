"""Logits processors of vLLM's V1 model runner, its public hook into sampling, for two purposes.

`--logprobs-mode processed_logprobs`, log_normalize(logits / T) by our operation: vLLM normalises
with its own softmax, another operation on each device. Here the engine runs in its mode
"processed_logits", which hands back what the logits processors leave, and two processors leave
normalised logprobs: vLLM divides by the temperature between them.

And requests are refused that cannot be honoured, or would end the engine on the CPU.
"""

import torch
from torch import Tensor
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, process_dict_updates

from isomodels.kernels.logprob import log_normalize
from isomodels.vllm.requests import GREEDY_BELOW, check_processed, check_raw, check_seed


class _NormalizeRows(LogitsProcessor):
    """Normalises the rows of the greedy or of the random requests."""

    greedy: bool

    def __init__(self, vllm_config: object, device: torch.device, is_pin_memory: bool):
        self.device = device
        self.rows: dict[int, bool] = {}

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """See `check_processed`."""
        check_processed(sampling_params)

    def is_argmax_invariant(self) -> bool:
        # vLLM runs the others before the temperature, and these after it.
        return not self.greedy

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        def new_row(params: SamplingParams, *_: object) -> bool | None:
            return True if (params.temperature < GREEDY_BELOW) == self.greedy else None

        process_dict_updates(self.rows, batch_update, new_row)

    def apply(self, logits: Tensor) -> Tensor:
        """[R, V] fp32 -> the same tensor, our rows normalised."""
        if self.rows:
            rows = torch.tensor(sorted(self.rows), device=logits.device)
            logits[rows] = log_normalize(logits[rows])
        return logits


class NormalizeGreedyRows(_NormalizeRows):
    """Before the temperature, which for these rows is 1."""

    greedy = True


class NormalizeRandomRows(_NormalizeRows):
    """After the temperature."""

    greedy = False


class _ChecksOnly(LogitsProcessor):
    """Changes nothing: vLLM asks it about each request."""

    def __init__(self, vllm_config: object, device: torch.device, is_pin_memory: bool):
        pass

    def is_argmax_invariant(self) -> bool:
        """See the base class."""
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """See the base class."""

    def apply(self, logits: Tensor) -> Tensor:
        """See the base class."""
        return logits


class CheckRaw(_ChecksOnly):
    """For `--logprobs-mode raw_logprobs`."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """See `check_raw`."""
        check_raw(sampling_params)


class RefuseSeeds(_ChecksOnly):
    """For the CPU."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """See `check_seed`."""
        check_seed(sampling_params)


CHECK_RAW = f"{__name__}:CheckRaw"
REFUSE_SEEDS = f"{__name__}:RefuseSeeds"
NORMALIZE = (f"{__name__}:NormalizeGreedyRows", f"{__name__}:NormalizeRandomRows")
