"""vLLM with its own launcher over several processes: the logprobs of the whole module, by bits."""

import pytest
import torch

pytest.importorskip("vllm", reason="vllm is not installed")

from isomodels.batch import Batch
from isomodels.checkpoint import load_checkpoint
from isomodels.layers.routes import record_routes
from isomodels.vllm.engine import Engine, Request
from tests.megatron.bits import assert_same_bits

LIMITS = {
    "max_model_len": 256,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 8,
    "block_size": 16,
    "num_gpu_blocks_override": 40,
    "enable_prefix_caching": True,
    "skip_tokenizer_init": True,
}
HYBRID = {"full_attention_interval": 2, "linear_num_value_heads": 4}
EXPERTS = {"enable_expert_parallel": True}
LENGTHS = (5, 70, 33, 20, 100)  # within a chunk and beyond, shared by decodes


def requests(vocab_size: int) -> list[Request]:
    generator = torch.Generator().manual_seed(1)
    return [
        Request(
            torch.randint(vocab_size, (n,), generator=generator).tolist(),
            max_tokens=12,
            prompt_logprobs=n % 2 == 0,
            arrival=i,
        )
        for i, n in enumerate(LENGTHS)
    ]


CASES = [
    ("Qwen3ForCausalLM", 2, {}),
    ("Glm4MoeLiteForCausalLM", 2, EXPERTS),
    ("Qwen3_5MoeForCausalLM", 2, EXPERTS),
    *[
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("MiMoForCausalLM", 2, {}),
            ("Qwen3MoeForCausalLM", 2, {}),
            ("Qwen3MoeForCausalLM", 2, EXPERTS),
            ("Glm4MoeLiteForCausalLM", 2, {}),
            ("DeepseekV3ForCausalLM", 2, EXPERTS),
            ("Qwen3_5ForCausalLM", 2, {}),
            ("Qwen3NextForCausalLM", 2, {}),
            ("Qwen3NextForCausalLM", 2, EXPERTS),
            ("Qwen3ForCausalLM", 4, {}),
            ("MiMoForCausalLM", 4, {}),  # which share two key heads
            ("Qwen3MoeForCausalLM", 4, EXPERTS),
            ("Glm4MoeLiteForCausalLM", 4, {}),
            ("Glm4MoeLiteForCausalLM", 4, EXPERTS),
            ("DeepseekV3ForCausalLM", 4, EXPERTS),
            ("Qwen3_5ForCausalLM", 4, {}),
            ("Qwen3_5MoeForCausalLM", 4, EXPERTS),
        )
    ],
]


@pytest.mark.parametrize(("architecture", "workers", "how"), CASES)
def test_workers_give_the_bits_of_the_module(tiny, architecture, workers, how):
    hybrid = architecture.startswith(("Qwen3_5", "Qwen3Next"))
    # few key heads: a block, which is as long as a state is large, is to fit into a prompt
    fields = {**HYBRID, "linear_num_key_heads": workers} if hybrid else {}
    path = tiny(architecture, "bfloat16", **fields)
    core = load_checkpoint(path).requires_grad_(False)
    with Engine(
        path, dtype="bfloat16", record_routes=True, tensor_parallel_size=workers, **how, **LIMITS
    ) as engine:
        results = engine.run(requests(core.config.vocab_size), seed=3)
        repeated = engine.run(requests(core.config.vocab_size), seed=3)  # prefixes are cached now
    assert len(results) == len(LENGTHS)
    assert any(result.num_cached_tokens for result in repeated)
    for result in (*results, *repeated):  # which sample as the steps fall
        ids = torch.tensor([*result.prompt, *(token.id for token in result.tokens)])
        bounds = torch.tensor([0, len(ids)], dtype=torch.int32)
        with record_routes(core) as recorded:
            hidden = core(ids, Batch.positions(bounds), Batch.packed(bounds))
        expected = core.token_logprobs(hidden[:-1], ids[1:])
        got = torch.tensor([*(result.prompt_logprobs or []), *(t.logprob for t in result.tokens)])
        assert_same_bits(got, expected[-len(got) :])
        if core.config.routing is not None:
            routes = recorded.take()
            for first, ids_of_step in result.routes:
                step = torch.from_numpy(ids_of_step)
                assert torch.equal(step, routes[first : first + len(step)])
