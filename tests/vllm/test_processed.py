"""`--logprobs-mode processed_logprobs`: both hosts give log_normalize(logits / temperature)."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from isomodels.kernels.logprob import log_normalize
from isomodels.vllm import Engine, Request
from tests.checkpoints import make_qwen3
from tests.vllm.support import assert_equal_bits, bits, draw, load_core, needs_v2_runner

# An odd vocabulary, no multiple of 1,024.
VOCAB = 1003


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    path = make_qwen3(tmp_path_factory.mktemp("processed"), vocab_size=VOCAB, num_hidden_layers=2)
    file = path / "model.safetensors"
    tensors = load_file(file)
    # Logits above 100: their exponentials overflow unless the maximum goes first.
    tensors["lm_head.weight"] *= 12
    save_file(tensors, file, metadata={"format": "pt"})
    (path / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_p": 0.95}))
    limits = {"max_model_len": 128, "max_num_batched_tokens": 40, "block_size": 16}
    with Engine(path, dtype="float32", logprobs_mode="processed_logprobs", **limits) as engine:
        yield engine, load_core(path)


def test_row_23_temperatures(pair):
    """The ratio of the two hosts was 2 at T = 0.6: one scaled the logits, the other did not."""
    engine, core = pair
    temperatures = [0.6, 1.0, 1.5, 0.0, 0.6, 2.0]
    requests = [
        Request(draw(7 + 8 * i, i), max_tokens=12, temperature=t, arrival=i)
        for i, t in enumerate(temperatures)
    ]
    results = engine.run(requests, seed=23)
    assert assert_equal_bits(core, results, temperatures) == 6 * 12
    assert min(t.logprob for t in results[-1].tokens) < -0.1, "logprobs near 0 hide differences"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_row_23_dividing_by_one_changes_no_bit(pair, temperature):
    engine, core = pair
    results = engine.run([Request(draw(30, 1), max_tokens=5, temperature=temperature)])
    assert_equal_bits(core, results, 1.0)


def test_row_27_sampled_logprob_is_our_operation():
    """A sampler that inlines log(softmax) takes another path than the trainer's operation."""
    from vllm.v1.sample.logits_processor import BatchUpdate

    from isomodels.vllm.sampling import NormalizeGreedyRows, NormalizeRandomRows

    params = _params(temperature=1.0), _params(temperature=0.0), _params(temperature=0.5)
    update = BatchUpdate(
        3, removed=[], added=[(i, p, [], []) for i, p in enumerate(params)], moved=[]
    )
    for vocab in (1, 509, 1024, 1025, 2049):
        logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(vocab)) * 1e4
        logits[:, 1::3] = -torch.inf
        for cls, rows in ((NormalizeGreedyRows, [1]), (NormalizeRandomRows, [0, 2])):
            processor = cls(None, torch.device("cpu"), False)
            processor.update_state(update)
            got = processor.apply(logits.clone())
            expected = logits.clone()
            expected[rows] = log_normalize(logits[rows])
            assert torch.equal(got.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize(
    "option",
    [
        {"top_p": 0.9},
        {"top_k": 5},
        {"min_p": 0.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
        {"repetition_penalty": 1.1},
        {"logit_bias": {3: 1.0}},
        {"allowed_token_ids": [1, 2]},
        {"bad_words": ["t7"]},
        {"min_tokens": 2},
        {"prompt_logprobs": 0},
    ],
    ids=lambda option: next(iter(option)),
)
def test_row_24_truncated_sampling_is_refused(pair, option):
    """Neither side renormalised top-k and top-p: such a request is an HTTP 400."""
    from vllm.exceptions import VLLMValidationError

    engine, _ = pair
    with pytest.raises(VLLMValidationError, match=f"isomodels: {next(iter(option))} cannot"):
        engine.llm.generate([{"prompt_token_ids": [1, 2, 3]}], _params(**option), use_tqdm=False)


@needs_v2_runner
@pytest.mark.parametrize("name", ["prompt_logprobs", "prompt_logprob_token_ids"])
def test_logprobs_of_a_prompt_are_refused_by_both_runners(name):
    """A prompt has no temperature. The second is an option that only the V2 runner knows."""
    from types import SimpleNamespace

    from vllm.exceptions import VLLMValidationError

    from isomodels.vllm.sampling import NormalizeGreedyRows
    from isomodels.vllm.sampling_v2 import CheckProcessed

    fields = {f: getattr(_params(), f) for f in _params().__struct_fields__}
    for processor in (NormalizeGreedyRows, CheckProcessed):
        processor.validate_params(SimpleNamespace(**fields))
        with pytest.raises(VLLMValidationError, match=f"isomodels: {name} cannot"):
            processor.validate_params(SimpleNamespace(**{**fields, name: [1]}))


def test_defaults_of_generation_config_are_named(pair):
    """They reach a request that says nothing; the message must lead there."""
    engine, _ = pair
    with pytest.raises(Exception, match="--generation-config vllm"):
        engine.llm.generate([{"prompt_token_ids": [1, 2, 3]}], use_tqdm=False)


def test_processors_move_with_their_requests(pair):
    """Requests of all kinds that come and go change rows in vLLM's batch."""
    engine, core = pair
    temperatures = [(0.0, 0.7, 1.3)[i % 3] for i in range(14)]
    requests = [
        Request(draw(3 + i, i), max_tokens=2 + (5 * i) % 7, temperature=t, arrival=i // 2)
        for i, t in enumerate(temperatures)
    ]
    results = engine.run(requests, seed=5)
    assert_equal_bits(core, results, temperatures)
    assert len({bits([t.logprob for t in r.tokens]).tobytes() for r in results}) == 14


def _params(**options):
    from vllm import SamplingParams

    return SamplingParams(**{"max_tokens": 3, "logprobs": 0, **options})
