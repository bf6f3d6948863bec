"""What an `Engine` is asked for and what it says: tokens with the way each was computed."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Request:
    """One prompt.

    Attributes:
        prompt: token ids.
        max_tokens: tokens to sample; the end-of-sequence token does not stop earlier.
        temperature, top_p: 0 is greedy.
        prompt_logprobs: ask for the logprobs of the prompt. vLLM then reads no cached prefix.
        n: samples of this prompt.
        arrival: step of the run at which the request is handed in.
        allowed_token_ids: the only tokens that may be sampled; None: all.
    """

    prompt: Sequence[int]
    max_tokens: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    prompt_logprobs: bool = False
    n: int = 1
    arrival: int = 0
    allowed_token_ids: Sequence[int] | None = None


@dataclass(frozen=True)
class Token:
    """One sampled token and how it was computed.

    Attributes:
        id: token id.
        logprob: the engine's fp32 value; a Python float holds it exactly.
        step: step of the run that made it.
        rows: rows of its request in that step: 1 is a decode.
        history: tokens of its request that had been computed (or cached) before that step.
        preemptions: how often its request had been preempted by then.
        replayed: its step was a replay of a CUDA graph.
    """

    id: int
    logprob: float
    step: int
    rows: int
    history: int
    preemptions: int
    replayed: bool = False


@dataclass
class Result:
    """One sampled sequence.

    Attributes:
        request, sample: index of the request in the run, and of the sample within it.
        prompt: token ids.
        tokens: sampled tokens.
        prompt_logprobs: fp32 logprobs of prompt tokens 1, 2, ... or None.
        chunks: (start, end) of each step that computed prompt tokens, up to the first sample.
        num_cached_tokens: prompt tokens found in the prefix cache.
        preemptions: of the whole sequence.
        routes: of each step that computed tokens of the sequence, where the engine records them:
            (first, ids [n, layers with experts, k] int32) of tokens first to first + n.
    """

    request: int
    sample: int
    prompt: tuple[int, ...]
    tokens: list[Token] = field(default_factory=list)
    prompt_logprobs: list[float] | None = None
    chunks: list[tuple[int, int]] = field(default_factory=list)
    num_cached_tokens: int = 0
    preemptions: int = 0
    routes: list[tuple[int, npt.NDArray[np.int32]]] = field(default_factory=list)

    def case(self, index: int) -> str:
        """Case of sampled token `index`, by the scheduler's account."""
        token = self.tokens[index]
        if token.preemptions:
            return "engine_resume"
        if self.num_cached_tokens:
            return "engine_prefix_hit"
        if index:
            return "engine_decode_graph" if token.replayed else "engine_decode"
        return self.prompt_case()

    def prompt_case(self) -> str:
        """Case of the prompt's logprobs."""
        if self.tokens and self.tokens[0].preemptions:
            return "engine_resume"
        return "engine_chunked_prefill" if len(self.chunks) > 1 else "engine_prefill"


@dataclass(frozen=True)
class Step:
    """One step of the scheduler: how many rows and requests it computed of each kind.

    `replayed`: a CUDA graph was replayed, and Python did not run the model.
    """

    prefill_rows: int
    prefill_requests: int
    decode_rows: int
    resumed_requests: int
    replayed: bool = False
