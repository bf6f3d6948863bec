"""The decoder of the hybrids: gated delta rule and gated attention layers, zero-centred norms."""

from typing import Unpack

from torch import Tensor, nn

from isomodels.batch import Batch
from isomodels.layers.decoder import CausalLM, Decoder, MakeMLP
from isomodels.layers.gated_attention import GatedAttention
from isomodels.layers.gated_delta import GatedDeltaNet
from isomodels.layers.hybrid_config import HybridConfig
from isomodels.layers.linear import Embedding, LMHead, Placed
from isomodels.layers.mlp import MLP
from isomodels.layers.parallel import ALONE, LayerStack, check_layout
from isomodels.layers.zero_centred import ZeroCentredRMSNorm


class HybridLayer(nn.Module):
    """norm, attention of the layer's kind, norm, feed-forward; each norm first adds the residual.

    The attention is `self_attn` or `linear_attn`, the names in HF files.
    """

    def __init__(
        self,
        config: HybridConfig,
        layer_index: int,
        make_mlp: MakeMLP | None,
        **placed: Unpack[Placed],
    ):
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        kind = config.layer_types[layer_index]
        place = config.layers_of(kind).index(layer_index)
        self.input_layernorm = ZeroCentredRMSNorm(hidden, eps, **placed)
        if kind == "full_attention":
            self.mixer = "self_attn"
            self.self_attn = GatedAttention(config, place, **placed)
        else:
            self.mixer = "linear_attn"
            self.linear_attn = GatedDeltaNet(config, place, **placed)
        self.post_attention_layernorm = ZeroCentredRMSNorm(hidden, eps, **placed)
        if make_mlp is None:
            self.mlp: nn.Module = MLP(hidden, config.intermediate_size, **placed)
        else:
            self.mlp = make_mlp(layer_index)

    def forward(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor]:
        """x and residual [T, H] -> (output not yet added [T, H], residual stream [T, H])."""
        x, residual = self.input_layernorm(x, residual)
        x = self.get_submodule(self.mixer)(x, positions, batch)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual


class HybridDecoder(Decoder):
    """Embedding, layers, final norm."""

    def __init__(self, config: HybridConfig, make_mlp: MakeMLP | None, **placed: Unpack[Placed]):
        nn.Module.__init__(self)  # the same forward over other parts
        stage = placed.get("layout", ALONE).stage
        if stage.embeds:
            self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, **placed)
        indices = stage.layers(config.num_hidden_layers)
        layers = [HybridLayer(config, i, make_mlp, **placed) for i in indices]
        self.layers: nn.ModuleList = LayerStack(layers, indices.start)
        if stage.heads:
            self.norm = ZeroCentredRMSNorm(config.hidden_size, config.rms_norm_eps, **placed)


class HybridCausalLM(CausalLM):
    """A hybrid decoder with its head: what a host runs.

    `make_mlp` gives each layer its feed-forward; by default all are dense.
    """

    def __init__(
        self,
        config: HybridConfig,
        *,
        make_mlp: MakeMLP | None = None,
        **placed: Unpack[Placed],
    ):
        nn.Module.__init__(self)
        self.layout = placed.get("layout", ALONE)
        check_layout(config, self.layout)
        self.config = config
        self.model = HybridDecoder(config, make_mlp, **placed)
        if self.layout.stage.heads:
            self.lm_head = LMHead(
                config.hidden_size, config.vocab_size, tied=config.tie_word_embeddings, **placed
            )
