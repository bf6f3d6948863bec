"""Configs at the edges of what is read: the same bits in every way, and transformers' numbers."""

import pytest
import torch

from isomodels.layers.routes import record_routes
from tests.dense.models import run_packed, tokens
from tests.kernel.battery import assert_same_bits
from tests.moe.mla.models import YARN, LatentEngine, load_ours, load_theirs, make, their_routes

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "vocab_size": 64,
    "num_hidden_layers": 2,
    "num_nextn_predict_layers": 0,
    "max_position_embeddings": 64,
    "moe_intermediate_size": 20,
}
SPARSE = {"first_k_dense_replace": 0, "mlp_layer_types": ["sparse", "sparse"]}
ODD = {
    "all experts, weights as they are": (
        "moonlight",
        {
            **SPARSE,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
            "routed_scaling_factor": 0.5,
            "n_shared_experts": 3,
        },
    ),
    "all groups and experts": ("deepseek", {"topk_group": 4, "num_experts_per_tok": 16}),
    "groups of two": ("deepseek", {"n_group": 8, "topk_group": 3, "num_experts_per_tok": 6}),
    "I == H": ("deepseek", {"moe_intermediate_size": 64, "routed_scaling_factor": 1.0}),
    "2 * I == H": ("glm", {**SPARSE, "moe_intermediate_size": 32}),
    "two mscales": (
        "deepseek",
        {"rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.3}, "v_head_dim": 8},
    ),
    "one expert a token, halves": (
        "glm",
        {"num_experts_per_tok": 1, "q_lora_rank": None, "rope_interleave": False, "v_head_dim": 56},
    ),
    "odd sizes": (
        "glm",
        {
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "n_routed_experts": 7,
            "num_experts_per_tok": 5,
            "kv_lora_rank": 38,
            "q_lora_rank": 13,
            "qk_nope_head_dim": 10,
            "qk_rope_head_dim": 6,
            "v_head_dim": 20,
            "norm_topk_prob": False,
        },
    ),
}


def forward(model, run):
    """(logprobs [T, V], hidden states and logprobs [T, H + V], routes [T, layers, k])."""
    with record_routes(model) as recorded:
        hidden = run()
    logprobs = model.logprobs(hidden)
    return logprobs, torch.cat((hidden.float(), logprobs), 1), recorded.take()


@pytest.mark.parametrize("odd", ODD)
def test_the_same_bits_in_every_way_and_the_numbers_of_fp64(tmp_path, odd):
    name, changes = ODD[odd]
    folder = make(name, tmp_path, **SMALL | changes)
    ids = tokens(23, vocab=64)
    for dtype in (torch.bfloat16, torch.float32):
        model = load_ours(folder).to(dtype).requires_grad_(False)
        logprobs, bits, routes = forward(model, lambda m=model: run_packed(m, ids))
        for step in (1, 9):
            engine = LatentEngine(model, [23], 16)
            if dtype == torch.bfloat16:
                for pages in engine.pages:
                    pages.cache = pages.cache.bfloat16()
            parts = [
                forward(model, lambda e=engine, t=t: e.step({0: t}))[1:] for t in ids.split(step)
            ]
            assert_same_bits(torch.cat([part for part, _ in parts]), bits, f"steps of {step}")
            assert torch.equal(torch.cat([part for _, part in parts]), routes)
    theirs, _, chosen, _ = their_routes(load_theirs(folder, torch.float64), ids)
    assert torch.equal(routes.sort(-1).values, chosen.sort(-1).values)
    assert (logprobs.double() - theirs.double().log_softmax(-1)).abs().max() < 1e-4
