"""The module cut over real processes: every rank sees the bits of the whole module."""

from typing import Any

import pytest
import torch

from isomodels.parity.ranks import Ranks
from tests.megatron.bits import assert_same_bits
from tests.parallel.conftest import CORE

LENGTHS = [1, 17, 64, 3, 35]  # 120 tokens: a multiple of 2 and 4
CASES = ("hidden", "logits", "logprobs", "token_logprobs")
DENSE = ("Qwen3ForCausalLM", "MiMoForCausalLM")
EXPERTS = ("Qwen3MoeForCausalLM", "Glm4MoeLiteForCausalLM", "DeepseekV3ForCausalLM")
ALONE: dict[tuple, dict[str, Any]] = {}


def run(processes: Ranks, path: Any, **how: Any) -> list[dict[str, Any]]:
    processes.submit("run", str(path), LENGTHS, **how)
    return [one for one in processes.results() if one is not None]


def alone(processes: Ranks, path: Any, **how: Any) -> dict[str, Any]:
    key = (str(path), *how.items())
    if key not in ALONE:
        (ALONE[key],) = run(processes, path, **how)
    return ALONE[key]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sequence", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("architecture", DENSE)
def test_dense_over_ranks(four_ranks, tiny, architecture, size, sequence, dtype):
    # tied in one of them; two key heads, which four ranks share
    fields = {"tie_word_embeddings": True} if architecture == "Qwen3ForCausalLM" else {}
    path = tiny(architecture, dtype, **fields)
    expected = alone(four_ranks, path)
    for small in (0, 1 << 30):
        for got in run(four_ranks, path, ranks=size, sequence=sequence, small=small):
            for case in CASES:
                assert_same_bits(got[case], expected[case], case)


def test_another_order_of_the_ranks_is_seen(four_ranks, tiny):
    path = tiny("MiMoForCausalLM", "float32")
    expected = alone(four_ranks, path)
    got = run(four_ranks, path, ranks=4, fault=True)[0]
    with pytest.raises(AssertionError, match=r"token_logprobs: [0-9]+ of 120 differ"):
        assert_same_bits(got["token_logprobs"], expected["token_logprobs"], "token_logprobs")


@pytest.mark.parametrize(
    ("architecture", "how"),
    [
        ("Qwen3_5ForCausalLM", {"sequence": False}),
        ("Qwen3_5ForCausalLM", {"sequence": True}),
        ("Qwen3_5MoeForCausalLM", {"sequence": True, "experts": 2}),
        ("Qwen3NextForCausalLM", {"sequence": False, "experts": 2}),
    ],
)
def test_hybrids_over_ranks(four_ranks, tiny, architecture, how):
    fields = {
        "num_hidden_layers": 4,
        "full_attention_interval": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    }
    path = tiny(architecture, "bfloat16", **fields)
    expected = alone(four_ranks, path)
    for got in run(four_ranks, path, ranks=2, **how):
        for case in CASES:
            assert_same_bits(got[case], expected[case], case)
    path = tiny(architecture, "float32", **fields)
    expected = alone(four_ranks, path, gradients=True)["gradients"]
    got = run(four_ranks, path, ranks=2, gradients=True, **how)[0]["gradients"]
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(got[name], gradient, atol=1e-5 * scale, rtol=0, msg=name)


LAYOUTS = [
    {"sequence": False},
    {"sequence": True, "experts": 2},
    {"sequence": False, "experts": 2},
    {"sequence": False, "replicated": True},
    {"sequence": False, "experts": 2, "replicated": True},
]


@pytest.mark.parametrize("how", LAYOUTS, ids=lambda how: "-".join(how))
@pytest.mark.parametrize("architecture", EXPERTS)
def test_experts_over_ranks(four_ranks, tiny, architecture, how):
    path = tiny(architecture, "bfloat16")
    expected = alone(four_ranks, path)
    for got in run(four_ranks, path, ranks=2, **how):
        for case in CASES:
            assert_same_bits(got[case], expected[case], case)


@pytest.mark.parametrize("how", LAYOUTS[:3], ids=lambda how: "-".join(how))
@pytest.mark.parametrize("architecture", EXPERTS)
def test_gradients_of_experts_over_ranks(four_ranks, tiny, architecture, how):
    no_query_latent = {"q_lora_rank": None} if architecture == "DeepseekV3ForCausalLM" else {}
    path = tiny(architecture, "float32", **no_query_latent)
    expected = alone(four_ranks, path, gradients=True)["gradients"]
    got = run(four_ranks, path, ranks=2, gradients=True, **how)[0]["gradients"]
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(got[name], gradient, atol=5e-6 * scale, rtol=0, msg=name)


@pytest.mark.parametrize("sequence", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("architecture", DENSE)
def test_gradients_over_ranks(four_ranks, tiny, architecture, size, sequence):
    path = tiny(architecture, "float32", tie_word_embeddings=architecture == "Qwen3ForCausalLM")
    expected = alone(four_ranks, path, gradients=True)["gradients"]
    got = run(four_ranks, path, ranks=size, sequence=sequence, gradients=True)[0]["gradients"]
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(got[name], gradient, atol=3e-6 * scale, rtol=0, msg=name)


@pytest.mark.parametrize("size", [2, 4])
def test_bytes_on_the_wire(four_ranks, size):
    """Large messages cost 1.5 times a ring all-reduce in bfloat16, small ones one gather."""
    rows, columns = 512, 1024
    four_ranks.submit("traffic", size, rows, columns)
    ring = 2 * (size - 1) * rows * columns * 2 // size
    assert [b for b in four_ranks.results() if b is not None] == [3 * ring // 2] * size
    four_ranks.submit("traffic", size, 1, columns)
    assert [b for b in four_ranks.results() if b is not None] == [(size - 1) * columns * 4] * size


EIGHT_HEADS = {"num_attention_heads": 8, "head_dim": 16}  # two key heads, which four ranks share


@pytest.mark.parametrize("sequence", [False, True], ids=["tp", "sp"])
def test_eight_ranks_of_which_two_share_a_leaf(eight_ranks, tiny, sequence):
    path = tiny("MiMoForCausalLM", "bfloat16", **EIGHT_HEADS)
    expected = alone(eight_ranks, path)
    for small in (0, 1 << 30):
        for got in run(eight_ranks, path, ranks=8, sequence=sequence, small=small):
            for case in CASES:
                assert_same_bits(got[case], expected[case], case)
    path = tiny("MiMoForCausalLM", "float32", **EIGHT_HEADS)
    expected = alone(eight_ranks, path, gradients=True)["gradients"]
    got = run(eight_ranks, path, ranks=8, sequence=sequence, gradients=True)[0]["gradients"]
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(got[name], gradient, atol=3e-6 * scale, rtol=0, msg=name)


def test_bytes_on_the_wire_of_a_shared_leaf(eight_ranks):
    """A leaf's columns of x are exchanged, and each rank sends half as many partial sums."""
    rows, columns = 256, 1024
    eight_ranks.submit("traffic", 8, rows, columns)
    of_x = rows * columns // 8 * 2
    partial, rounded = 7 * rows * columns // 2 * 4 // 8, 7 * rows * columns * 2 // 8
    ring = 2 * 7 * rows * columns * 2 // 8
    assert eight_ranks.results() == [of_x + partial + rounded] * 8
    assert of_x + partial + rounded < 1.1 * ring


@pytest.mark.parametrize("sequence", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("size", [2, 4])
def test_negative_zeros_of_the_embedding(four_ranks, size, sequence):
    four_ranks.submit("negative_zeros", size, sequence)
    assert [one for one in four_ranks.results() if one is not None] == [True] * size


def test_a_target_outside_the_vocabulary_is_refused_by_every_rank(tiny):
    with Ranks("core", CORE, 2) as ranks:
        ranks.results()
        ranks.submit("outside", str(tiny("Qwen3ForCausalLM", "float32")))
        assert ranks.results() == [("IndexError", "IndexError")] * 2
