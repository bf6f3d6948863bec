"""Weights of every rank of one layout into every rank of another, in one process."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from itertools import chain, product
from typing import Any

import pytest
import torch

from isomodels.config import read_config
from isomodels.layers.parallel import ExpertParallel, Layout, Stage, TensorParallel
from isomodels.layers.pieces import Piece, copy_overlap, missing, pieces
from isomodels.parity.checkpoints import tiny_config
from isomodels.registry import load_object
from tests.megatron.bits import assert_same_bits

LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 8}
LATENT = {**LAYERS, "num_key_value_heads": 8}
HYBRID = {
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "num_attention_heads": 8,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 8,
}
MODELS = {
    "Qwen3ForCausalLM": {**LAYERS, "tie_word_embeddings": True},
    "MiMoForCausalLM": LAYERS,
    "Qwen3MoeForCausalLM": LAYERS,
    "Glm4MoeLiteForCausalLM": LATENT,
    "DeepseekV3ForCausalLM": {**LATENT, "q_lora_rank": None},
    "Qwen3_5ForCausalLM": HYBRID,
    "Qwen3NextForCausalLM": HYBRID,
}


@cache
def config_of(architecture: str) -> tuple[Any, Any]:
    raw = {**tiny_config(architecture), **MODELS[architecture], "dtype": "bfloat16"}
    return read_config(raw)


def build(architecture: str, layout: Layout) -> Any:
    spec, config = config_of(architecture)
    core = load_object(spec.model)(config, dtype=torch.bfloat16, layout=layout)
    core.requires_grad_(False)
    for tensor in core.state_dict().values():
        tensor.fill_(torch.nan)  # what nobody fills is seen
    return core


@cache
def whole_model(architecture: str) -> Any:
    core = build(architecture, Layout())
    generator = torch.Generator().manual_seed(1)
    for tensor in core.state_dict().values():
        bits = torch.randint(1 << 15, tensor.shape, generator=generator, dtype=torch.int32)
        tensor.copy_(bits.to(torch.int16).view(torch.bfloat16).nan_to_num())
    return core


def ranks(tp: int = 1, ep: int = 1, pp: int = 1) -> Callable[[str], list[Any]]:
    """Every rank's part of a model, filled as a loader fills it."""

    def make(architecture: str) -> list[Any]:
        layers = config_of(architecture)[1].num_hidden_layers // pp
        found = []
        for stage, tensor in product(range(pp), range(tp)):
            layout = Layout(
                TensorParallel(tensor, tp),
                ExpertParallel(tensor % ep, ep),
                Stage()
                if pp == 1
                else Stage(stage * layers, (stage + 1) * layers, stage == 0, stage == pp - 1),
            )
            core = build(architecture, layout)
            state = core.state_dict()
            whole = whole_model(architecture).state_dict()
            for own, part in core.own_tensors(whole.items()):
                state[own].copy_(part)
            found.append(core)
        return found

    return make


LAYOUTS = {
    "tp1": ranks(),
    "tp2": ranks(tp=2),
    "tp4": ranks(tp=4),
    "tp2,pp2": ranks(tp=2, pp=2),
    "tp8": ranks(tp=8),  # two ranks share a leaf of K: weights are cut along both axes
    "tp2,ep2": ranks(tp=2, ep=2),
}


@pytest.mark.parametrize("architecture", MODELS)
def test_any_layout_fills_any_other(architecture):
    experts = config_of(architecture)[1].routing is not None
    layouts = {
        name: [pieces(core) for core in make(architecture)]
        for name, make in LAYOUTS.items()
        if experts or "ep" not in name
    }
    one, *cut = layouts.values()  # one process, and the others in a ring
    ring = zip(cut, [*cut[1:], cut[0]], strict=True)
    for sender, receiver in [*ring, *((one, other) for other in cut), (cut[-1], one)]:
        sent = by_name(one for rank in sender for one in rank if not one.copy)
        for rank in receiver:
            assert missing(chain.from_iterable(sent.values()), rank) == []
            for wanted in rank:
                empty = replace(wanted, tensor=torch.full_like(wanted.tensor, -1))
                written = sum(copy_overlap(one, empty) for one in sent[wanted.name])
                assert written == wanted.tensor.numel()
                assert_same_bits(empty.tensor, wanted.tensor, wanted.name)


def by_name(found: Iterable[Piece]) -> dict[str, list[Piece]]:
    groups: dict[str, list[Piece]] = {}
    for one in found:
        groups.setdefault(one.name, []).append(one)
    return groups


def test_a_block_that_is_lost_or_doubled_is_named():
    one, other = (pieces(core) for core in LAYOUTS["tp2"]("MiMoForCausalLM"))
    (whole,) = (pieces(core) for core in LAYOUTS["tp1"]("MiMoForCausalLM"))
    lost = "model.layers.0.mlp.down_proj.weight"
    kept = [piece for piece in other if piece.name != lost]
    assert missing([*one, *kept], whole) == [lost]
    again = next(piece for piece in one if piece.name == lost)
    assert missing([*one, *other, again], whole) == [lost]
    assert missing([*one, *other], whole) == []


def test_tensors_of_other_shapes_or_dtypes_are_refused():
    name, zeros = "model.norm.weight", torch.zeros(8, dtype=torch.bfloat16)
    target = Piece(name, (0,), (8,), zeros)
    for shape, source in (((8,), zeros.float()), ((16,), zeros)):
        with pytest.raises(ValueError, match=r"model.norm.weight is .* on the other"):
            copy_overlap(Piece(name, (0,), shape, source), target)
    assert copy_overlap(Piece("another", (0,), (8,), zeros), target) == 0
