"""The pre-norm decoder that all architectures share, and its language model."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Unpack

from torch import Tensor, nn

from isomodels.batch import Batch
from isomodels.config import DenseConfig
from isomodels.layers.collectives import enter
from isomodels.layers.linear import Embedding, LMHead, Placed
from isomodels.layers.moe import feed_forward
from isomodels.layers.norm import RMSNorm
from isomodels.layers.parallel import ALONE, LayerStack, Layout, check_layout, shards

RunLayer = Callable[..., tuple[Tensor, Tensor]]
MakeLayer = Callable[[int], nn.Module]  # index in the whole model -> a `DecoderLayer`


class DecoderLayer(nn.Module):
    """norm, attention, norm, feed-forward; each norm first adds what came before to the residual.

    Args:
        config: the architecture's; it says whether the feed-forward has experts.
        layer_index: in the whole model.
        attention: called as attention(x [T, H], positions [T], batch) -> [T, H].
        attention_name: of the submodule, as in HF files.
        norm: class of both norms.
    """

    def __init__(
        self,
        config: DenseConfig,
        layer_index: int,
        attention: nn.Module,
        *,
        attention_name: str = "self_attn",
        norm: type[RMSNorm] = RMSNorm,
        **placed: Unpack[Placed],
    ):
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.attention_name = attention_name
        self.input_layernorm = norm(hidden, eps, **placed)
        self.add_module(attention_name, attention)
        self.post_attention_layernorm = norm(hidden, eps, **placed)
        self.mlp = feed_forward(config, layer_index, **placed)

    def forward(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor]:
        """x and residual [T, H] -> (output not yet added [T, H], residual stream [T, H])."""
        x, residual = self.input_layernorm(x, residual)
        x = self.get_submodule(self.attention_name)(x, positions, batch)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual


class Decoder(nn.Module):
    """Embedding, layers, final norm."""

    def __init__(
        self,
        config: DenseConfig,
        make_layer: MakeLayer,
        norm: type[RMSNorm],
        **placed: Unpack[Placed],
    ):
        super().__init__()
        stage = placed.get("layout", ALONE).stage
        if stage.embeds:
            self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, **placed)
        indices = stage.layers(config.num_hidden_layers)
        self.layers: nn.ModuleList = LayerStack([make_layer(i) for i in indices], indices.start)
        if stage.heads:
            self.norm = norm(config.hidden_size, config.rms_norm_eps, **placed)

    def run_stage(
        self,
        x: Tensor,
        residual: Tensor | None,
        positions: Tensor,
        batch: Batch,
        run_layer: RunLayer,
    ) -> tuple[Tensor, Tensor | None]:
        """The layers of this stage: x and residual, [T, H] or slices, to those of the next."""
        for layer in self.layers:
            x, residual = run_layer(layer, x, residual, positions, batch)
        return x, residual

    def forward(
        self, input_ids: Tensor, positions: Tensor, batch: Batch, run_layer: RunLayer
    ) -> Tensor:
        """input_ids and positions [T] int64 -> hidden [T, H]."""
        x = self.embed_tokens(input_ids)
        x, residual = self.run_stage(x, None, positions, batch, run_layer)
        return self.norm(x, residual)[0]


def call_layer(layer: nn.Module, *args: Any) -> tuple[Tensor, Tensor]:
    """The default `run_layer`."""
    return layer(*args)


class CausalLM(nn.Module):
    """A decoder with its head: what a host runs.

    The host supplies the parameters' values and, in `batch`, where past K and V lie. It adds no
    arithmetic.

    Args:
        config: the architecture's.
        make_layer: makes a decoder layer, called for those of this process.
        norm: class of the final norm.

    Attributes:
        layout: what this process holds of the model.

    Raises:
        UnsupportedError: the layout does not divide the model.
    """

    def __init__(
        self,
        config: DenseConfig,
        make_layer: MakeLayer,
        *,
        norm: type[RMSNorm] = RMSNorm,
        **placed: Unpack[Placed],
    ):
        super().__init__()
        self.layout: Layout = placed.get("layout", ALONE)
        check_layout(config, self.layout)
        self.config = config
        self.model = Decoder(config, make_layer, norm, **placed)
        if self.layout.stage.heads:
            self.lm_head = LMHead(
                config.hidden_size, config.vocab_size, tied=config.tie_word_embeddings, **placed
            )

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        batch: Batch,
        *,
        run_layer: RunLayer = call_layer,
    ) -> Tensor:
        """Run the decoder.

        Args:
            input_ids: [T] int64.
            positions: [T] int64, each token's position in its sequence.
            batch: sequence bounds and pages.
            run_layer: called as run_layer(layer, *args) for each layer; a trainer wraps layers
                here for activation checkpointing.

        Returns:
            Hidden states after the final norm, [T, H], also under sequence parallelism.
        """
        return self.finish(self.model(input_ids, positions, batch, run_layer))

    def own_tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """What this process holds of tensors of the whole model.

        Args:
            tensors: names of the whole model's parameters or buffers, and their values.

        Yields:
            Name and value of each tensor here that is a part, or a copy, of one of them.
        """
        held, parts = self.state_dict().keys(), shards(self)
        for name, whole in tensors:
            names = [name]
            if name == "model.embed_tokens.weight" and self.config.tie_word_embeddings:
                names.append("lm_head.weight")  # a stage with the head alone has a copy
            for own in names:
                if own in held:
                    yield own, parts[own].take(whole) if own in parts else whole

    def finish(self, hidden: Tensor) -> Tensor:
        """Normed hidden states, or a slice of them -> [T, H] for the head, on every rank."""
        return enter(hidden, self.layout.tensor)

    @property
    def head_weight(self) -> Tensor:
        """[V, H]; the embedding's own parameter where the two are tied."""
        weight = self.lm_head.weight
        return self.model.embed_tokens.weight if weight is None else weight

    def logits(self, hidden: Tensor) -> Tensor:
        """[T, H] -> [T, V] fp32."""
        return self.lm_head(hidden, self.head_weight)

    def logprobs(self, hidden: Tensor, temperature: float = 1.0) -> Tensor:
        """Log-softmax of logits / temperature: [T, H] -> [T, V] fp32."""
        return self.lm_head(hidden, self.head_weight, None, temperature)

    def token_logprobs(self, hidden: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
        """[T, H], targets [T] int64 -> [T] fp32, the bits of `logprobs` at the targets."""
        return self.lm_head(hidden, self.head_weight, targets, temperature)
