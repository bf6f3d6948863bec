"""The workloads hold what they promise, and drawn checkpoints have a trained model's logits."""

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from isomodels.batch import Batch
from isomodels.checkpoint import load_checkpoint
from isomodels.config import read_config
from isomodels.errors import UnsupportedError
from isomodels.layers.gated_delta import state_layout
from isomodels.parity.checkpoints import random_checkpoint, tiny_config
from isomodels.parity.run import run_parity
from isomodels.parity.workload import (
    BLOCK_SIZE,
    WORKLOADS,
    PromptSource,
    Round,
    page_of,
    rounds,
    with_states,
)

CONFIGS = Path(__file__).parents[1] / "data" / "configs"


def _rounds(name: str, device: str = "cuda") -> list[Round]:
    return list(rounds(PromptSource(Path("nowhere"), 1000, 0), device, WORKLOADS[name]))


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_request_fits_and_the_crowd_does_not(name: str) -> None:
    workload = WORKLOADS[name]
    scored, shared, crowd, graphs, eager = _rounds(name)
    for one in (scored, shared, crowd, graphs, eager):
        assert all(len(r.prompt) + r.max_tokens <= workload.max_model_len for r in one.requests)
    pages = workload.num_blocks * BLOCK_SIZE
    assert sum(len(r.prompt) + r.max_tokens for r in crowd.requests) > pages
    assert len(crowd.requests) <= workload.max_num_seqs
    for one in (graphs, eager):
        assert sum(len(r.prompt) + r.max_tokens for r in one.requests) < pages
        assert sum(r.max_tokens - 1 for r in one.requests) > 200
    assert (graphs.graphs, eager.graphs) == (True, False)
    assert [one.aim for one in _rounds(name, "cpu")] == [one.aim for one in (scored, shared, crowd)]


def test_the_full_workload_reaches_beyond_two_segments_and_every_batch_size() -> None:
    workload = WORKLOADS["full"]
    scored, shared, _, graphs, _ = _rounds("full")
    assert max(len(r.prompt) for r in scored.requests) > 2 * 2048
    assert max(len(r.prompt) for r in shared.requests) > 2 * 2048
    # One token a step: who still runs at each?
    sizes = Counter(step for r in graphs.requests for step in range(r.max_tokens)).values()
    assert max(sizes) == workload.max_num_seqs
    assert min(sizes) == 1
    assert len(set(sizes)) > 100
    assert sum(size % 2 for size in set(sizes)) > 40


HYBRIDS = ["qwen3.5-9b", "qwen3.5-35b-a3b"]


@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3-8b", "mimo-7b", *HYBRIDS])
def test_configs_of_real_models(name: str) -> None:
    _, config = read_config(CONFIGS / name)
    assert config.max_position_embeddings >= WORKLOADS["full"].max_model_len
    assert config.dtype == "bfloat16"


@pytest.mark.parametrize("name", HYBRIDS)
def test_pages_as_large_as_a_state(name: str) -> None:
    _, config = read_config(CONFIGS / name)
    workload = with_states(WORKLOADS["full"], config, "cuda")
    page, size = page_of(config, "cuda")
    assert workload.page == page
    assert size % page == 0
    layout = state_layout(config, torch.bfloat16, "cuda")
    state = sum(math.prod(shape) * dtype.itemsize for shape, dtype in layout)
    assert size - BLOCK_SIZE * size // page < state <= size
    made = list(rounds(PromptSource(Path("nowhere"), 1000, 0), "cuda", workload))
    _, _, crowd, graphs, _ = made
    pages = 1 + 3  # of keys, and a state of each group of recurrent layers
    assert len(crowd.requests) == workload.max_num_seqs
    assert pages * len(graphs.requests) < workload.num_blocks
    assert all(len(r.prompt) + r.max_tokens < page for r in graphs.requests)
    ends = [(len(r.prompt), len(r.prompt) + r.max_tokens) for r in crowd.requests]
    crossing = sum(first <= page < last for first, last in ends)
    assert pages * len(ends) + crossing > workload.num_blocks + 16
    with pytest.raises(UnsupportedError, match="use --workload full"):
        with_states(WORKLOADS["quick"], config, "cuda")


@pytest.mark.parametrize(
    ("heads", "ranks", "page"),
    [(1, 1, 16), (2, 1, 32), (4, 1, 64), (4, 2, 64), (4, 4, 32), (8, 1, 128), (8, 8, 32)],
)
def test_pages_that_a_step_fills(tmp_path: Path, heads: int, ranks: int, page: int) -> None:
    raw = tiny_config("Qwen3_5ForCausalLM") | {"dtype": "bfloat16", "full_attention_interval": 2}
    raw |= {"linear_num_key_heads": heads, "linear_num_value_heads": 2 * heads}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    _, config = read_config(tmp_path)
    workload = with_states(WORKLOADS["quick"], config, "cpu", ranks)
    assert workload.page == page_of(config, "cpu", ranks)[0] == page
    made = list(rounds(PromptSource(Path("nowhere"), 1000, 0), "cuda", workload))
    assert all(r.prompt for one in made for r in one.requests)

    def needed(tokens: int) -> int:
        return -(-tokens // page) + 1  # keys, and the running state of the one group

    for one in made:
        longest = max(len(r.prompt) + r.max_tokens for r in one.requests)
        assert longest <= workload.max_model_len
        assert needed(longest) + 1 < workload.num_blocks
    crowd = made[2].requests
    assert len(crowd) <= workload.max_num_seqs
    assert sum(needed(len(r.prompt) + r.max_tokens) for r in crowd) > workload.num_blocks
    assert sum(needed(len(r.prompt)) for r in crowd) < workload.num_blocks  # all of them start


@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3-8b", "mimo-7b"])
def test_drawn_logits_spread_like_a_trained_model(tmp_path: Path, name: str) -> None:
    raw = json.loads((CONFIGS / name / "config.json").read_text())
    raw |= {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 2000}
    raw |= {"num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2}
    path = random_checkpoint(tmp_path / "drawn", raw, "float32", seed=0)
    core = load_checkpoint(path)
    ids = torch.randint(2000, (64,), generator=torch.Generator().manual_seed(0))
    bounds = torch.tensor([0, 64], dtype=torch.int32)
    with torch.no_grad():
        logits = core.logits(core(ids, torch.arange(64), Batch.packed(bounds)))
    assert 2.5 < logits.std() < 3.5
    # Not one direction for all tokens: what the histories differ in must reach the logits.
    assert torch.corrcoef(logits).triu(1).abs().max() < 0.9


@pytest.mark.slow
def test_the_full_workload_in_small(tmp_path: Path) -> None:
    raw = json.loads((CONFIGS / "qwen3-0.6b" / "config.json").read_text())
    raw |= {"hidden_size": 128, "intermediate_size": 192, "vocab_size": 1500, "head_dim": 64}
    raw |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    workload = replace(
        WORKLOADS["full"],
        max_model_len=1024,
        max_num_batched_tokens=251,
        max_num_seqs=32,
        num_blocks=120,
        scored=(1, 2, 64, 65, 130, 300, 700),
        prefixes=((160, 6), (300, 5)),
        crowded=24,
        microbatch=1024,
    )
    path = random_checkpoint(tmp_path / "drawn", raw, "bfloat16", seed=0)
    report = run_parity(path, workload=workload, stock=False)
    assert report.faults() == []
    assert report.num_layers == 2
