"""In vLLM's place: the bare module, one sequence and one token at a time."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from isomodels.batch import Batch
from isomodels.checkpoint import load_checkpoint
from isomodels.contract import Contract, contract_of, require_same


class ModuleEngine:
    """Samples as `grpo.Rollouts` does, takes weights as a `WeightSender` sends them."""

    def __init__(self, grpo: ModuleType, checkpoint: Path):
        self.grpo, self.core = grpo, load_checkpoint(checkpoint)
        self.contract = contract_of(checkpoint)
        self.version = "default"
        self.llm = self  # what LLMSyncClient calls

    @torch.no_grad()
    def sample(self, prompts: Sequence[list[int]], seed: int) -> list[Any]:
        """One answer to each prompt."""
        samples = []
        for number, prompt in enumerate(prompts):
            generator = torch.Generator().manual_seed(seed * len(prompts) + number)
            answer: list[int] = []
            rows: list[Tensor] = []
            while len(answer) < self.grpo.MOST + 3 and answer[-1:] != [self.grpo.END]:
                logprobs = self.next_logprobs([*prompt, *answer])
                answer.append(int(torch.multinomial(logprobs.exp(), 1, generator=generator)))
                rows.append(logprobs[answer[-1]])
            old = torch.stack(rows).numpy()
            samples.append(self.grpo.Sample(prompt, answer, old, self.version))
        return samples

    def next_logprobs(self, ids: Sequence[int]) -> Tensor:
        """[V] fp32 after these tokens."""
        positions = torch.arange(len(ids))
        bounds = torch.tensor([0, len(ids)], dtype=torch.int32)
        hidden = self.core(torch.tensor(ids), positions, Batch.packed(bounds))
        return self.core.logprobs(hidden[-1:])[0]

    def send(self, weights: Mapping[str, Tensor], version: str) -> None:
        """As `WeightSender.send`."""
        self.core.load_state_dict({name: tensor.clone() for name, tensor in weights.items()})
        self.version = version

    def collective_rpc(self, method: str) -> list[str]:
        """The question of `LLMSyncClient`."""
        assert method == "isomodels_contract"
        return [self.contract.to_json()]

    def init_weight_transfer_engine(self, request: dict[str, Any]) -> None:
        """The handshake of `isomodels.vllm.weight_transfer`."""
        trainer = Contract.from_json(request["init_info"]["contract"], "the trainer's contract")
        require_same(trainer, self.contract)
