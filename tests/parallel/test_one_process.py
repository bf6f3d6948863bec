"""Every rank of TP 2, 4 and 8 in one process, on the CPU or on one GPU: the bits of TP 1."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from isomodels.checkpoint import load_checkpoint, load_into, open_checkpoint
from isomodels.kernels.logprob import token_logprobs
from isomodels.kernels.row_linear import row_linear
from isomodels.kernels.vocab_parallel import VocabShard
from isomodels.layers.collectives import row_parallel, vocab_token_logprobs
from isomodels.layers.parallel import (
    ExpertParallel,
    Layout,
    TensorParallel,
    split_leaves,
    split_vocab,
)
from isomodels.registry import load_object
from tests.megatron.bits import assert_same_bits
from tests.parallel.core_rank import tokens
from tests.parallel.one_process import Meeting, in_one_process

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LENGTHS = [1, 17, 2, 20]  # 40 tokens: a multiple of 8
HEADS = {"num_hidden_layers": 2, "num_attention_heads": 8}
LATENT = {**HEADS, "num_key_value_heads": 8}
HYBRID = {
    **HEADS,
    "full_attention_interval": 2,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 8,
}
MODELS = {
    "Qwen3ForCausalLM": {**HEADS, "tie_word_embeddings": True},
    "MiMoForCausalLM": HEADS,  # two key heads, which four ranks share
    "Qwen3MoeForCausalLM": HEADS,
    "Glm4MoeLiteForCausalLM": LATENT,
    "DeepseekV3ForCausalLM": LATENT,
    "Qwen3_5ForCausalLM": HYBRID,
    "Qwen3NextForCausalLM": HYBRID,
}
RANKS = [2, 4, 8]


def layout(meeting: Meeting, rank: int, *, sequence: bool, experts: bool) -> Layout:
    tensor = TensorParallel(rank, meeting.size, meeting, sequence)
    divided = ExpertParallel(rank, meeting.size, meeting) if experts else ExpertParallel()
    return Layout(tensor, divided)


def results(core: Any, device: str) -> dict[str, torch.Tensor]:
    ids, positions, batch = tokens(LENGTHS, core.config.vocab_size, device)
    hidden = core(ids, positions, batch)
    return {
        "hidden": hidden,
        "logits": core.logits(hidden),
        "logprobs": core.logprobs(hidden, 0.7),
        "token_logprobs": core.token_logprobs(hidden, ids.roll(-1), 0.7),
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("architecture", MODELS)
def test_a_model_over_ranks(tiny, architecture, device):
    path = tiny(architecture, "bfloat16", **MODELS[architecture])
    with torch.no_grad():
        expected = results(load_checkpoint(path, device=device), device)
    has_experts = open_checkpoint(path).config.routing is not None
    for ranks in RANKS:
        for sequence in (False, True):
            got = run_model(path, device, ranks, sequence, has_experts and sequence)
            for rank, one in enumerate(got):
                for name, tensor in expected.items():
                    assert_same_bits(one[name], tensor, f"{name} on rank {rank} of {ranks}")


def run_model(path: Path, device: str, ranks: int, sequence: bool, experts: bool) -> list[Any]:
    meeting, checkpoint = Meeting(ranks), open_checkpoint(path)

    def work(rank: int) -> dict[str, torch.Tensor]:
        core = load_object(checkpoint.spec.model)(
            checkpoint.config,
            dtype=checkpoint.dtype,
            device=device,
            layout=layout(meeting, rank, sequence=sequence, experts=experts),
        )
        load_into(core, path)
        return results(core, device)

    with in_one_process():
        return meeting.run(work)


@cache
def normal(*shape: int, seed: int, device: str) -> torch.Tensor:
    """Values of many sizes: each order of a sum has bits of its own."""
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randn(2, *shape, generator=generator)
    return (draw[0] * torch.exp(draw[1])).to(device, torch.bfloat16)


# (rows, K, N): on a GPU the widths of Qwen3-8B's o_proj and down_proj, decodes and a prefill
SMALL = [(1, 64, 48), (21, 352, 128)]
REAL = [(m, k, 4096) for k in (4096, 12288) for m in (1, 16, 300)]


BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(
    ("device", "dtype", "shapes"),
    [
        ("cpu", BF16, SMALL),
        ("cpu", FP32, SMALL),
        pytest.param("cuda", BF16, REAL, marks=pytest.mark.gpu),
    ],
)
def test_row_linear_over_ranks(device, dtype, shapes, ranks):
    for rows, k, n in shapes:
        x, weight = (normal(m, k, seed=m, device=device).to(dtype) for m in (rows, n))
        expected, meeting = row_linear(x, weight), Meeting(ranks)

        def work(rank: int, x: Any = x, weight: Any = weight, meeting: Any = meeting) -> Any:
            own = split_leaves(*reversed(weight.shape), rank, ranks).take(weight)
            columns = x.chunk(ranks, 1)[rank].contiguous()
            return row_parallel(columns, own.contiguous(), TensorParallel(rank, ranks, meeting))

        with in_one_process():
            for got in meeting.run(work):
                assert_same_bits(got, expected, f"{rows} rows, {k} -> {n}")


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(
    ("device", "vocab_size", "width"),
    [("cpu", 1003, 64), pytest.param("cuda", 151_936, 4096, marks=pytest.mark.gpu)],
)
def test_token_logprobs_over_ranks(device, vocab_size, width, ranks):
    for rows in (1, 33):
        hidden = normal(rows, width, seed=1, device=device)
        weight = normal(vocab_size, width, seed=2, device=device) / width**0.5
        targets = tokens([rows], vocab_size, device)[0]
        expected, meeting = token_logprobs(hidden, weight, targets, 0.7)[0], Meeting(ranks)

        def work(
            rank: int, hidden: Any = hidden, targets: Any = targets, meeting: Any = meeting
        ) -> Any:
            vocab = VocabShard(vocab_size, rank, ranks)
            own = split_vocab(vocab).take(weight).contiguous()  # noqa: B023
            parallel = TensorParallel(rank, ranks, meeting)
            return vocab_token_logprobs(hidden, own, targets, 0.7, vocab, parallel)

        with in_one_process():
            for got in meeting.run(work):
                assert_same_bits(got, expected, f"{rows} rows of {vocab_size}")


def test_another_tree_is_seen(monkeypatch):
    """A rank whose leaves are folded in another order than the tree's."""
    from isomodels.layers import collectives

    monkeypatch.setattr(collectives, "tree", collectives.in_rank_order)
    with pytest.raises(AssertionError, match="differ"):
        test_row_linear_over_ranks("cpu", FP32, SMALL, 4)
