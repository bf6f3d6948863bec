"""What a request must not ask for, whichever model runner serves it: refused as HTTP 400."""

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

# vLLM's own bound, below which a request is greedy and its temperature counts as 1.
GREEDY_BELOW = 1e-5


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


def check_raw(params: SamplingParams) -> None:
    """Refuses a request whose sampling vLLM would not do as it says.

    A repetition penalty divides a logit above 0 and multiplies one below. vLLM samples from
    normalised logprobs here, none of which is above 0; every other option is the same for both.

    Raises:
        VLLMValidationError: HTTP 400.
    """
    if params.repetition_penalty != 1.0:
        raise VLLMValidationError(
            "isomodels: repetition_penalty cannot be used: it goes by the signs of logits, and "
            "vLLM gets logprobs. Leave it out (or start with --generation-config vllm if "
            "generation_config.json sets it), or use presence_penalty or frequency_penalty."
        )


def check_processed(params: SamplingParams) -> None:
    """Refuses a request whose processed logprobs the trainer could not follow.

    Raises:
        VLLMValidationError: HTTP 400.
    """
    if names := _changes(params):
        raise VLLMValidationError(
            f"isomodels: {', '.join(names)} cannot be used with --logprobs-mode "
            "processed_logprobs: the trainer scales by 1/temperature only. Leave it out (or "
            "start with --generation-config vllm if generation_config.json sets it), or "
            "start with --logprobs-mode raw_logprobs."
        )
    for name in ("prompt_logprobs", "prompt_logprob_token_ids"):
        if getattr(params, name, None) is not None:  # the second is of vLLM 0.32
            raise VLLMValidationError(
                f"isomodels: {name} cannot be used with --logprobs-mode processed_logprobs: a "
                "prompt has no temperature. Start with --logprobs-mode raw_logprobs."
            )


def check_seed(params: SamplingParams) -> None:
    """Refuses a seed, where vLLM cannot honour one.

    On the CPU the V1 runner cannot turn back a request's generator, which it does after a chunk
    of a prompt: the whole engine ends with "CPU Generator does not use offset".

    Raises:
        VLLMValidationError: HTTP 400.
    """
    if params.seed is not None and params.temperature >= GREEDY_BELOW:
        raise VLLMValidationError(
            "isomodels: seed cannot be used on the CPU with chunked prefill. Leave it out "
            "(the engine's own --seed makes runs repeatable) or start with "
            "--no-enable-chunked-prefill."
        )
