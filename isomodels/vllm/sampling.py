"""Logits processors, vLLM's public hook into sampling, for two purposes.

`--logprobs-mode processed_logprobs`, log_normalize(logits / T) by our operation: vLLM normalises
with its own softmax, another operation on each device. Here the engine runs in its mode
"processed_logits", which hands back what the logits processors leave, and two processors leave
normalised logprobs: vLLM divides by the temperature between them.

And a request that would end the engine on the CPU is refused.
"""

import torch
from torch import Tensor
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, process_dict_updates

from isomodels.kernels.logprob import log_normalize

# vLLM's own bound, below which a request is greedy and its temperature counts as 1.
_GREEDY_BELOW = 1e-5


def _changes(params: SamplingParams) -> list[str]:
    """Names of the options of a request that change the logits besides the temperature."""
    changed = {
        "top_p": params.top_p < 1.0,
        "top_k": params.top_k > 0,
        "min_p": params.min_p > 0.0,
        "presence_penalty": params.presence_penalty != 0.0,
        "frequency_penalty": params.frequency_penalty != 0.0,
        "repetition_penalty": params.repetition_penalty != 1.0,
        "logit_bias": bool(params.logit_bias),
        "allowed_token_ids": bool(params.allowed_token_ids),
        "bad_words": bool(params.bad_words),
        "min_tokens": params.min_tokens > 0,
        "structured_outputs": params.structured_outputs is not None,
        "thinking_token_budget": params.thinking_token_budget is not None,
    }
    return [name for name, on in changed.items() if on]


class _NormalizeRows(LogitsProcessor):
    """Normalises the rows of the greedy or of the random requests."""

    greedy: bool

    def __init__(self, vllm_config: object, device: torch.device, is_pin_memory: bool):
        self.device = device
        self.rows: dict[int, bool] = {}

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Refuses a request whose processed logprobs the trainer could not follow.

        Raises:
            VLLMValidationError: HTTP 400.
        """
        if names := _changes(sampling_params):
            raise VLLMValidationError(
                f"isomodels: {', '.join(names)} cannot be used with --logprobs-mode "
                "processed_logprobs: the trainer scales by 1/temperature only. Leave it out (or "
                "start with --generation-config vllm if generation_config.json sets it), or "
                "start with --logprobs-mode raw_logprobs."
            )
        if sampling_params.prompt_logprobs is not None:
            raise VLLMValidationError(
                "isomodels: prompt_logprobs cannot be used with --logprobs-mode "
                "processed_logprobs: a prompt has no temperature. Start with --logprobs-mode "
                "raw_logprobs."
            )

    def is_argmax_invariant(self) -> bool:
        # vLLM runs the others before the temperature, and these after it.
        return not self.greedy

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        def new_row(params: SamplingParams, *_: object) -> bool | None:
            return True if (params.temperature < _GREEDY_BELOW) == self.greedy else None

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


class RefuseSeeds(LogitsProcessor):
    """Changes nothing: vLLM asks it about each request.

    On the CPU vLLM cannot turn back a request's generator, which it does after a chunk of a
    prompt: the whole engine ends with "CPU Generator does not use offset".
    """

    def __init__(self, vllm_config: object, device: torch.device, is_pin_memory: bool):
        pass

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Refuses a seed.

        Raises:
            VLLMValidationError: HTTP 400.
        """
        if sampling_params.seed is not None and sampling_params.temperature >= _GREEDY_BELOW:
            raise VLLMValidationError(
                "isomodels: seed cannot be used on the CPU with chunked prefill. Leave it out "
                "(the engine's own --seed makes runs repeatable) or start with "
                "--no-enable-chunked-prefill."
            )

    def is_argmax_invariant(self) -> bool:
        """See the base class."""
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """See the base class."""

    def apply(self, logits: Tensor) -> Tensor:
        """See the base class."""
        return logits


REFUSE_SEEDS = f"{__name__}:RefuseSeeds"
NORMALIZE = (f"{__name__}:NormalizeGreedyRows", f"{__name__}:NormalizeRandomRows")
