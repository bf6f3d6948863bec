"""The core's head as Megatron's frameworks look for it.

Shape suffixes: B batch, S length, T = B * S tokens, H hidden size, V vocabulary.
"""

from typing import Any

from torch import Tensor, nn


class OutputLayer(nn.Module):
    """Megatron's view of the core's head: a submodule that frameworks call or replace.

    It owns no parameter (they stay in the core), so nothing is stored or counted twice.
    """

    bias = None

    _core: Any

    def __init__(self, core: nn.Module):
        super().__init__()
        self.__dict__["_core"] = core  # not a child: the core is registered once, by the model

    @property
    def weight(self) -> Tensor | None:
        """[V, H], or None where the embedding is the head (as in Megatron's own layer)."""
        return self._core.lm_head.weight

    def forward(
        self,
        hidden_SBH: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[Tensor, None]:
        """Logits.

        Args:
            hidden_SBH: final hidden states.
            weight: None or the tied embedding; the core knows its head.
            runtime_gather_output: nothing to gather without tensor parallelism.

        Returns:
            ([S, B, V] fp32, None).
        """
        hidden_TH, size = flatten(hidden_SBH)
        return self._core.logits(hidden_TH).view(*size, -1).transpose(0, 1), None

    def token_logprobs(
        self, hidden_SBH: Tensor, targets_BS: Tensor, temperature: float = 1.0
    ) -> Tensor:
        """Logprob of each target, [B, S] fp32, at logits / temperature."""
        hidden_TH, size = flatten(hidden_SBH)
        targets_T = targets_BS.reshape(-1)
        return self._core.token_logprobs(hidden_TH, targets_T, temperature).view(size)


def flatten(hidden_SBH: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """([T, H], (B, S)): tokens in the order of the sequences."""
    length, batch, width = hidden_SBH.shape
    return hidden_SBH.transpose(0, 1).reshape(-1, width), (batch, length)


def token_logprobs_processor(
    *, hidden_states: Tensor, output_layer: OutputLayer, labels: Tensor, context: Any, **_: Any
) -> Tensor:
    """An `output_processor` for trainers: logprobs of the labels instead of their loss.

    Args:
        hidden_states: [S, B, H].
        output_layer: the model's.
        labels: [B, S], each a token of the vocabulary.
        context: `output_processor_context`, a temperature or None for 1.

    Returns:
        [B, S] fp32.
    """
    return output_layer.token_logprobs(hidden_states, labels, 1.0 if context is None else context)
