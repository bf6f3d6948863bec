"""Logprobs of given tokens by Megatron's schedule: the part of a trainer that changes no weight."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import set_checkpoint_early_stop

from isomodels.errors import HostError
from isomodels.layers.routes import Routes
from isomodels.megatron.degrees import Degrees
from isomodels.megatron.packing import Pack, pack
from isomodels.megatron.stages import (
    LayerOutputs,
    from_last_stage,
    record_layers,
    routes_by_layer,
    unwrap,
)
from isomodels.trace import trace_rows

if TYPE_CHECKING:
    from isomodels.megatron.model import IsoLanguageModel


class Scoring:
    """What a trainer computes with the models that it has built.

    Attributes:
        models: the `IsoLanguageModel`s of this rank, one for each virtual stage.
        wrapped: each in Megatron's wrappers.
        layout: how the ranks share the model.
        recompute: whether the backward pass recomputes every layer.
        max_tokens: most tokens of one microbatch.
        optimizer: Megatron's, over `wrapped`.
    """

    models: "list[IsoLanguageModel]"
    wrapped: list[Any]
    layout: Degrees
    recompute: bool
    max_tokens: int
    optimizer: Any

    # The model of a rank without virtual stages: all there is, where there is one stage.

    @property
    def model(self) -> "IsoLanguageModel":
        """The first virtual stage of this rank."""
        return self.models[0]

    @property
    def ddp(self) -> Any:
        """Its wrapper."""
        return self.wrapped[0]

    @property
    def core(self) -> Any:
        """Its isomodels module."""
        return self.model.core

    def _pack(self, sequences: Sequence[Sequence[int]]) -> list[Pack]:
        device = next(self.core.parameters()).device
        multiple = self.layout.tp  # of tokens, which may be cut into slices
        return pack(sequences, self.max_tokens, device, multiple=multiple)

    def score(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[Tensor]:
        """Logprobs of given tokens without gradients, as a trainer scores a rollout.

        Args:
            sequences: token ids; each at least one long.
            temperature: logits are divided by it.

        Returns:
            For each sequence of n tokens, [n - 1] fp32: token i + 1 given tokens 0 to i.
        """
        packs = self._pack(sequences)
        for one in self.wrapped:
            one.eval()
        with torch.no_grad():
            rows = self._run(packs, forward_only=True, temperature=temperature)
        for one in self.wrapped:
            one.train()
        return _unpack(packs, rows)

    def forward_logprobs(
        self, sequences: Sequence[Sequence[int]], temperature: float = 1.0
    ) -> list[Tensor]:
        """Like `score`, from the forward pass of a training step (its gradients are dropped)."""
        packs = self._pack(sequences)
        with self._each_model("without_bias_update"):
            rows = self._run(packs, temperature=temperature)
        self._drop_gradients()
        return _unpack(packs, rows)

    def recompute_logprobs(
        self, sequences: Sequence[Sequence[int]], temperature: float = 1.0
    ) -> list[Tensor]:
        """Like `score`, from the layers as the backward pass recomputed them.

        Each layer must have run twice a microbatch; the head is then applied to what the second
        run of the last layer gave.

        Raises:
            HostError: without `recompute=True`, or if a layer was not recomputed.
        """
        if not self.recompute:
            raise HostError("recompute_logprobs needs Trainer(..., recompute=True)")
        packs = self._pack(sequences)
        rows: list[Tensor] = []
        try:
            for one in packs:
                # virtual stages take several microbatches: the same one, so that any run will do
                copies = [one] * (self.layout.pp if self.layout.vpp > 1 else 1)
                # early stop would end a recomputed layer before its output exists
                with (
                    set_checkpoint_early_stop(False),
                    self._each_model("without_bias_update"),
                    record_layers(self.models) as outputs,
                ):
                    self._run(copies)
                if any(len(runs) != 2 * len(copies) for runs in outputs.values()):
                    raise HostError("a layer was not recomputed in the backward pass")
                rows.append(self._head(one, outputs, temperature))
        finally:
            self._drop_gradients()
        return _unpack(packs, rows)

    def split_routes(
        self, recorded: Sequence[Routes], sequences: Sequence[Sequence[int]]
    ) -> list[npt.NDArray[np.int32]]:
        """Routes of a forward pass, sequence by sequence.

        Args:
            recorded: what `record_routes` kept of each of `models`.
            sequences: those that were run.

        Returns:
            For each sequence of n tokens, [n, layers with experts, k] of the whole model.
        """
        packs = self._pack(sequences)
        layers = routes_by_layer(self.models, recorded)  # [tokens of all microbatches, k] each
        rows, first = [], 0
        for one in packs:
            rows += [range(first + start, first + end) for start, end in one.bounds]
            first += one.input_ids.numel()
        whole = np.stack(layers, 1)
        return [np.ascontiguousarray(whole[list(kept)]) for kept in rows]

    @contextmanager
    def without_recompute(self) -> Iterator[None]:
        """Forward passes that keep every activation, in a trainer that else recomputes them."""
        with self._each_model("without_recompute"):
            yield

    @contextmanager
    def _each_model(self, context: str) -> Iterator[None]:
        with ExitStack() as stack:
            for model in self.models:
                stack.enter_context(getattr(model, context)())
            yield

    @torch.no_grad()
    def _head(self, one: Pack, outputs: LayerOutputs, temperature: float) -> Tensor:
        """[T] logprobs from what the last layer gave in its last run, a recomputed one."""
        rows = []
        last = self.models[-1]
        if last.post_process:
            *_, runs = outputs.values()
            core = last.core
            hidden = core.finish(core.model.norm(*runs[-1])[0])
            rows = [core.token_logprobs(hidden, one.targets.reshape(-1), temperature)]
        return from_last_stage(rows, [one])[0]

    @torch.no_grad()
    def trace(self, token_ids: Sequence[int], position: int) -> dict[str, str]:
        """Hashes of what each submodule of the core gives at one token.

        Args:
            token_ids: one sequence.
            position: index of the token.

        Returns:
            {submodule name: hash} in order of execution; see `isomodels.trace`.
        """

        def logprobs(*, hidden_states: Tensor, **_: Any) -> Tensor:
            return self.core.logprobs(hidden_states.squeeze(1))  # [S, 1, H] -> [S, V]

        (one,) = self._pack([token_ids])
        with trace_rows(self.core, position) as hashes:
            self.ddp(
                one.input_ids, None, None, packed_seq_params=one.params, output_processor=logprobs
            )
        return hashes

    def _drop_gradients(self) -> None:
        for one in self.wrapped:
            one.zero_grad_buffer()
        self.optimizer.zero_grad()

    def _run(
        self, packs: list[Pack], *, forward_only: bool = False, temperature: float = 1.0
    ) -> list[Tensor]:
        """Runs Megatron's schedule; returns the logprobs [T] of each microbatch."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        from isomodels.megatron.head import token_logprobs_processor

        rows: list[Tensor] = []
        packs_run = [*packs, *self._idle(packs)]

        def forward_step(data: Iterator[Pack], model: nn.Module) -> tuple[Tensor, Any]:
            one = next(data)
            processor: dict[str, Any] = {}
            if temperature != 1.0:  # else the path of a plain trainer
                processor = {
                    "output_processor": token_logprobs_processor,
                    "output_processor_context": temperature,
                }
            loss = model(
                one.input_ids,
                None,
                None,
                labels=one.targets,
                packed_seq_params=one.params,
                **processor,
            )
            if not unwrap(model).post_process:
                return loss, None  # the next stage's input
            if processor:
                loss = loss.neg()
            rows.append(loss.detach().neg().view(-1))

            def total(loss: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
                kept = loss.view(-1)[one.keep]
                return kept.sum(), one.keep.sum(dtype=torch.int), {}

            return loss, total

        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(packs_run) for _ in self.wrapped],
            model=self.wrapped,
            num_microbatches=len(packs_run),
            seq_length=self.max_tokens,
            micro_batch_size=1,
            forward_only=forward_only,
        )
        return from_last_stage(rows[: len(packs)], packs)

    def _idle(self, packs: list[Pack]) -> list[Pack]:
        """Microbatches without a target: virtual stages take as many as a multiple of stages."""
        if self.layout.vpp == 1:
            return []
        missing = -len(packs) % self.layout.pp
        return self._pack([[0]]) * missing


def _unpack(packs: list[Pack], rows: list[Tensor]) -> list[Tensor]:
    """The rows of each sequence that have a target, in the order of the sequences."""
    return [
        row[start : end - 1].clone()
        for one, row in zip(packs, rows, strict=True)
        for start, end in one.bounds
    ]
