"""The pre-norm decoder that the architectures of the Qwen line share, and its language model."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Unpack

from torch import Tensor, nn

from isomodels.batch import Batch
from isomodels.config import DenseConfig
from isomodels.layers.attention import SelfAttention
from isomodels.layers.collectives import enter
from isomodels.layers.linear import Embedding, LMHead, Placed
from isomodels.layers.mlp import MLP
from isomodels.layers.norm import RMSNorm
from isomodels.layers.parallel import ALONE, LayerStack, Layout, check_layout, shards

RunLayer = Callable[..., tuple[Tensor, Tensor]]
MakeMLP = Callable[[int], nn.Module]  # layer index -> feed-forward, [T, H] -> [T, H]
# layer index -> attention, called as attention(x [T, H], positions [T], batch) -> [T, H]
MakeAttention = Callable[[int], nn.Module]


class DecoderLayer(nn.Module):
    """norm, attention, norm, MLP; each norm first adds what came before to the residual."""

    def __init__(
        self,
        config: DenseConfig,
        layer_index: int,
        *,
        qkv_bias: bool,
        qk_norm: bool,
        make_attention: MakeAttention | None,
        make_mlp: MakeMLP | None,
        **placed: Unpack[Placed],
    ):
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden, eps, **placed)
        if make_attention is None:
            self.self_attn: nn.Module = SelfAttention(
                config, layer_index, qkv_bias=qkv_bias, qk_norm=qk_norm, **placed
            )
        else:
            self.self_attn = make_attention(layer_index)
        self.post_attention_layernorm = RMSNorm(hidden, eps, **placed)
        if make_mlp is None:
            self.mlp: nn.Module = MLP(hidden, config.intermediate_size, **placed)
        else:
            self.mlp = make_mlp(layer_index)

    def forward(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor]:
        """x and residual [T, H] -> (output not yet added [T, H], residual stream [T, H])."""
        x, residual = self.input_layernorm(x, residual)
        x = self.self_attn(x, positions, batch)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual


class Decoder(nn.Module):
    """Embedding, layers, final norm."""

    def __init__(
        self,
        config: DenseConfig,
        *,
        qkv_bias: bool,
        qk_norm: bool,
        make_attention: MakeAttention | None,
        make_mlp: MakeMLP | None,
        **placed: Unpack[Placed],
    ):
        super().__init__()
        stage = placed.get("layout", ALONE).stage
        if stage.embeds:
            self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, **placed)
        indices = stage.layers(config.num_hidden_layers)
        layers = [
            DecoderLayer(
                config,
                i,
                qkv_bias=qkv_bias,
                qk_norm=qk_norm,
                make_attention=make_attention,
                make_mlp=make_mlp,
                **placed,
            )
            for i in indices
        ]
        self.layers: nn.ModuleList = LayerStack(layers, indices.start)
        if stage.heads:
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, **placed)

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
    arithmetic. `make_attention` and `make_mlp` give each layer its parts; by default attention is
    grouped-query attention with or without `qkv_bias` and `qk_norm`, and the feed-forward dense.

    Attributes:
        layout: what this process holds of the model.
    """

    layout: Layout = ALONE  # of a model that takes none

    def __init__(
        self,
        config: DenseConfig,
        *,
        qkv_bias: bool = False,
        qk_norm: bool = False,
        make_attention: MakeAttention | None = None,
        make_mlp: MakeMLP | None = None,
        **placed: Unpack[Placed],
    ):
        super().__init__()
        self.layout = placed.get("layout", ALONE)
        check_layout(config, self.layout)
        self.config = config
        self.model = Decoder(
            config,
            qkv_bias=qkv_bias,
            qk_norm=qk_norm,
            make_attention=make_attention,
            make_mlp=make_mlp,
            **placed,
        )
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
