"""`--logprobs-mode processed_logprobs` in vLLM's V2 model runner: log_normalize(logits / T).

There every logits processor runs before the temperature, and the division by it is a Triton `/`,
which does not round as IEEE does. So the sampler itself is replaced, through the hook that vLLM
gives to models (`get_model_state_cls`, `custom_sampler`). What else would change the logits is
refused with the request, so the sampler's own pipeline has nothing to do.
"""

from typing import Any

from torch import Tensor
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcessor
from vllm.v1.worker.gpu.sample.sampler import Sampler

from isomodels.kernels.logprob import log_normalize
from isomodels.vllm.requests import check_processed, check_raw


class _ChecksOnly(LogitsProcessor):
    """Changes nothing: vLLM asks it about each request."""

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """See the base class."""
        return False

    def apply(self, logits: Tensor, ctx: LogitsContext) -> Tensor:
        """See the base class."""
        return logits


class CheckRaw(_ChecksOnly):
    """For `--logprobs-mode raw_logprobs`, where vLLM's own sampler runs."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """See `check_raw`."""
        check_raw(sampling_params)


class CheckProcessed(_ChecksOnly):
    """For `--logprobs-mode processed_logprobs`."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """See `check_processed`."""
        check_processed(sampling_params)


class NormalizingSampler(Sampler):
    """Samples from, and returns, normalised logprobs at each request's temperature."""

    def apply_sampling_params(
        self, logits: Tensor, expanded_idx_mapping: Tensor, *_: Any, **__: Any
    ) -> Tensor:
        """[R, V] fp32 logits, [R] request of each row -> [R, V] fp32 logprobs."""
        temperature = self.sampling_states.temperature.gpu[expanded_idx_mapping]
        # A greedy request has temperature 0, and its logprobs are those at 1.
        divisor = temperature.masked_fill(temperature == 0.0, 1.0)
        return log_normalize(logits / divisor.unsqueeze(1))


class NormalizingState(DefaultModelState):
    """What vLLM keeps beside a model: here it replaces the sampler."""

    def custom_sampler(self, sampler: Any) -> tuple[Any, Any] | None:
        """See the base class."""
        ours = NormalizingSampler(
            vllm_config=self.vllm_config,
            max_num_reqs=self.max_num_reqs,
            vocab_size=sampler.req_states.vocab_size,
            device=self.device,
            req_states=sampler.req_states,
            logprobs_mode=sampler.logprobs_mode,
            num_speculative_tokens=sampler.num_speculative_tokens,
            use_fp64_gumbel=sampler.use_fp64_gumbel,
            enable_trace_replay=sampler.trace_replay_state is not None,
            return_sampling_mask=sampler.return_sampling_mask,
        )
        return ours, None


class NormalizingHybridState(NormalizingState, MambaHybridModelState):
    """The same for a model with recurrent state."""
