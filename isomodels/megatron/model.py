"""The Megatron model around one isomodels core. It holds no arithmetic of its own.

Shape suffixes: B batch, S length, T = B * S tokens, H hidden size, V vocabulary.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes
from megatron.core.transformer.enums import ModelType
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from isomodels.errors import UnsupportedError
from isomodels.kernels.logprob import log_normalize
from isomodels.layers.collectives import check_slices
from isomodels.layers.parallel import Layout
from isomodels.layers.pinned import pinned_tensors
from isomodels.megatron.bias_update import bias_updates
from isomodels.megatron.experts import prepare_experts
from isomodels.megatron.head import OutputLayer, flatten, token_logprobs_processor
from isomodels.megatron.inputs import Tokens, read_tokens
from isomodels.megatron.layout import mark_parameters
from isomodels.megatron.sharding import sharded_state


class IsoLanguageModel(LanguageModule):
    """What Megatron's trainers expect of a GPT model, around `core`.

    Args:
        config: Megatron's `TransformerConfig`, checked by `provider.check_transformer_config`.
        core: an isomodels model with its weights, dtype `config.params_dtype`: the part that its
            `layout` states.
        pg_collection: Megatron's process groups; the global ones by default.
        parallel_output: has no effect: logits are whole on every tensor parallel rank.
        vp_stage: which virtual pipeline stage, or None.

    Attributes:
        load_balancing_losses: of the last training forward, by layer index; see `experts`.

    Raises:
        ValueError: where a tensor of the core is not of `config.params_dtype`.
    """

    core: Any

    def __init__(
        self,
        config: Any,
        core: Any,
        pg_collection: Any | None = None,
        parallel_output: bool = True,
        vp_stage: int | None = None,
    ):
        super().__init__(config=config, pg_collection=pg_collection)
        self.layout: Layout = core.layout
        self.pre_process, self.post_process = self.layout.stage.embeds, self.layout.stage.heads
        self.vp_stage = vp_stage
        self.input_tensor: Tensor | None = None
        self.mtp_process = False
        self.model_type = ModelType.encoder_or_decoder
        self.parallel_output = parallel_output
        self.vocab_size: int = core.config.vocab_size
        self.max_sequence_length: int = core.config.max_position_embeddings
        self.share_embeddings_and_output_weights: bool = core.config.tie_word_embeddings
        self.core = core
        if self.post_process:
            self.output_layer = OutputLayer(core)
        self._check_dtypes()
        self._recomputed = _recomputed_layers(config, core.model.layers)
        self.load_balancing_losses = prepare_experts(config, core)
        self.bias_updates = bias_updates(config, core)
        mark_parameters(core, self.layout)
        self.setup_embeddings_and_output_layer()
        for param in self.parameters():
            set_defaults_if_not_set_tensor_model_parallel_attributes(param)

    def _check_dtypes(self) -> None:
        pinned = pinned_tensors(self.core)
        for name, tensor in [*self.core.named_parameters(), *self.core.named_buffers()]:
            wanted = pinned.get(name, self.config.params_dtype)
            if tensor.is_floating_point() and tensor.dtype != wanted:
                raise ValueError(
                    f"{name} is {tensor.dtype} and must be {wanted}; casting it would change the "
                    "result"
                )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "IsoLanguageModel":
        # Wrappers (Float16Module) and .to() cast every float tensor: none may change its dtype.
        super()._apply(fn, recurse)
        self._check_dtypes()
        return self

    def _set_attention_backend(self) -> None:
        """Megatron sets Transformer Engine's NVTE_* variables here; this model runs none of it."""

    def setup_embeddings_and_output_layer(self) -> None:
        """Mark embedding and head; a tied weight that two stages hold gets both gradients.

        Megatron fills the second copy by an all-reduce with zeros, which would turn -0 into +0:
        here both are loaded.
        """
        ends = [self.embedding.word_embeddings.weight] if self.pre_process else []
        if self.post_process and self.output_layer.weight is not None:
            ends.append(self.output_layer.weight)
        for weight in ends:
            weight.is_embedding_or_output_parameter = True
        if not self.share_embeddings_and_output_weights or not ends:
            return
        weight = self.shared_embedding_or_output_weight()
        if self.pre_process and self.post_process:
            weight.zero_out_wgrad = True
        else:
            weight.shared_embedding = True
            weight.shared = self.post_process  # its norm counts once, on the first stage

    # Names that trainers, wrappers and checkpoint code look up on a GPT model.

    @property
    def embedding(self) -> SimpleNamespace:
        """`embedding.word_embeddings.weight` is the [V, H] table."""
        return SimpleNamespace(word_embeddings=self.core.model.embed_tokens)

    @property
    def decoder(self) -> SimpleNamespace:
        """`decoder.layers[i]` is the i-th layer of the core."""
        return SimpleNamespace(layers=self.core.model.layers)

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Takes what the former pipeline stage sent, [t, 1, 2H]; None on the first."""
        tensors = input_tensor if isinstance(input_tensor, list | tuple) else [input_tensor]
        (self.input_tensor,) = tensors
        if self.pre_process and self.input_tensor is not None:
            raise UnsupportedError("the first pipeline stage takes tokens, not another's output")

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input: Tensor | None = None,
        labels: Tensor | None = None,
        inference_context: Any | None = None,
        packed_seq_params: Any | None = None,
        extra_block_kwargs: dict[str, Any] | None = None,
        runtime_gather_output: bool | None = None,
        *,
        inference_params: Any | None = None,
        loss_mask: Tensor | None = None,
        padding_mask: Tensor | None = None,
        output_processor: Callable[..., Any] | None = None,
        output_processor_context: Any | None = None,
    ) -> Any:
        """Runs a microbatch; the arguments are those of Megatron's `GPTModel`.

        Args:
            input_ids: [B, S], or [1, T] with `packed_seq_params`.
            position_ids: see `inputs.read_tokens`.
            attention_mask: see `inputs.read_tokens`.
            labels: [B, S] targets, each in the vocabulary.
            packed_seq_params: bounds of packed sequences ("thd").
            runtime_gather_output: without tensor parallelism there is nothing to gather.
            loss_mask: has no effect here, as in `GPTModel`: the loss is not reduced.
            output_processor: called with the final hidden states [S, B, H] and the names that
                `GPTModel` passes; its result is returned. See `token_logprobs_processor`.
            output_processor_context: passed to it as `context`.

        Returns:
            Without labels, logits [B, S, V] fp32; with labels, their negative logprobs
            [B, S] fp32. Not on the last pipeline stage: what the next one takes, [t, 1, 2H], the
            last layer's output and the residual stream of this rank's tokens.

        Raises:
            UnsupportedError: for an argument that cannot be honoured.
        """
        _refuse_given(
            decoder_input=decoder_input,
            inference_context=inference_context,
            inference_params=inference_params,
            extra_block_kwargs=extra_block_kwargs or None,
            padding_mask=padding_mask,
        )
        tokens = read_tokens(
            input_ids, position_ids, attention_mask, packed_seq_params, self.max_sequence_length
        )
        if self.layout.tensor.sequence:
            check_slices(len(tokens.input_ids), self.layout.tensor)
        hidden_TH = self._run_stage(tokens)
        if not self.post_process:
            return hidden_TH
        hidden_SBH = hidden_TH.view(*input_ids.shape, -1).transpose(0, 1)
        if output_processor is not None:
            return output_processor(
                hidden_states=hidden_SBH,
                output_layer=self.output_layer,
                output_weight=self._tied_weight(),
                labels=labels,
                loss_mask=loss_mask,
                input_ids=input_ids,
                position_ids=position_ids,
                attention_mask=attention_mask,
                decoder_input=None,
                inference_context=None,
                packed_seq_params=packed_seq_params,
                runtime_gather_output=runtime_gather_output,
                context=output_processor_context,
                compute_language_model_loss=self.compute_language_model_loss,
                scale_logits=lambda logits: logits,
                config=self.config,
            )
        if labels is None:
            logits_SBV, _ = self.output_layer(
                hidden_SBH,
                weight=self._tied_weight(),
                runtime_gather_output=runtime_gather_output,
            )
            return logits_SBV.transpose(0, 1).contiguous()
        if not isinstance(self.output_layer, OutputLayer):
            raise UnsupportedError("output_layer was replaced: call the model without labels")
        return self.output_layer.token_logprobs(hidden_SBH, labels).neg()

    def _run_stage(self, tokens: Tokens) -> Tensor:
        """[T, H] after the final norm, or what goes to the next stage."""
        if self.pre_process and self.post_process:
            return self.core(
                tokens.input_ids, tokens.positions, tokens.batch, run_layer=self._run_layer
            )
        model, residual = self.core.model, None
        if self.pre_process:
            x = model.embed_tokens(tokens.input_ids)
        else:
            assert self.input_tensor is not None, "the schedule hands it over"
            x, residual = (part.squeeze(1) for part in self.input_tensor.chunk(2, dim=-1))
            x, residual = x.contiguous(), residual.contiguous()
        x, residual = model.run_stage(x, residual, tokens.positions, tokens.batch, self._run_layer)
        if self.post_process:
            return self.core.finish(model.norm(x, residual)[0])
        # a tensor of its own: the schedule frees its storage
        return torch.cat((x.unsqueeze(1), residual.unsqueeze(1)), -1)

    def _tied_weight(self) -> Tensor | None:
        if not self.share_embeddings_and_output_weights:
            return None
        return self.shared_embedding_or_output_weight()

    def _run_layer(self, layer: nn.Module, *args: Any) -> Any:
        if layer in self._recomputed and self.training and torch.is_grad_enabled():
            # no dropout anywhere, so there is no random state to replay
            return checkpoint(layer, *args, use_reentrant=False, preserve_rng_state=False)
        return layer(*args)

    @contextmanager
    def without_recompute(self) -> Iterator[None]:
        """Keep every activation while the context is open."""
        recomputed, self._recomputed = self._recomputed, set()
        try:
            yield
        finally:
            self._recomputed = recomputed

    @contextmanager
    def without_bias_update(self) -> Iterator[None]:
        """Forward and backward passes of no step: the routers' biases stay, nothing is counted."""
        updates: Any = self.bias_updates
        self.bias_updates = nn.ModuleList()
        try:
            yield
        finally:
            self.bias_updates = updates
            for update in updates:
                update.local_tokens_per_expert.zero_()

    def logprobs(
        self,
        input_ids: Tensor,
        targets: Tensor,
        packed_seq_params: Any | None = None,
        temperature: float = 1.0,
    ) -> Tensor:
        """Logprob of `targets[i]` after `input_ids[.. i]`, differentiable.

        Args:
            input_ids: [B, S], or [1, T] with `packed_seq_params`.
            targets: of the same shape, each in the vocabulary.
            packed_seq_params: bounds of packed sequences.
            temperature: logits are divided by it, as the engine's processed logprobs are.

        Returns:
            [B, S] fp32.
        """
        return self(
            input_ids,
            labels=targets,
            packed_seq_params=packed_seq_params,
            output_processor=token_logprobs_processor,
            output_processor_context=temperature,
        )

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Negative logprobs from logits that were already computed.

        Args:
            labels: [B, S], each in the vocabulary.
            logits: [S, B, V] fp32.

        Returns:
            [B, S] fp32, with the bits of the loss that `forward` returns.
        """
        logits_TV, size = flatten(logits)
        logprobs_TV = log_normalize(logits_TV, 1.0)
        return logprobs_TV.gather(1, labels.reshape(-1, 1)).view(size).neg()

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> Any:
        """For `dist_checkpointing`: every tensor of the core under its own name, once."""
        return sharded_state(self.core, f"{prefix}core.", self.pg_collection)


def _recomputed_layers(config: Any, layers: nn.ModuleList) -> set[nn.Module]:
    """The layers whose activations are recomputed in the backward pass."""
    if config.recompute_granularity is None:
        return set()
    if config.recompute_method == "block":
        return set(layers[: config.recompute_num_layers])
    return set(layers)


def _refuse_given(**arguments: object) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise UnsupportedError(f"isomodels does not support the argument {name} of forward")
