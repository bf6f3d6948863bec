"""Every case of the engine gives the bits of one packed forward. Rows: field reports by number."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from isomodels.errors import CheckpointError, HostError
from isomodels.trace import trace_rows
from isomodels.vllm import Engine, Request
from tests.checkpoints import make_mimo, make_qwen3
from tests.vllm.support import assert_equal_bits, bits, draw, load_core

BLOCK = 16
LIMITS = {
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 48,
    "block_size": BLOCK,
    "num_gpu_blocks_override": 24,
}
CHECKPOINTS = {
    "qwen3-float32": lambda path: make_qwen3(path, torch.float32, tied=False),
    "qwen3-bfloat16-tied": lambda path: make_qwen3(path, torch.bfloat16, tied=True),
    "mimo-bfloat16": lambda path: make_mimo(path, torch.bfloat16),
}


@pytest.fixture(scope="module", params=CHECKPOINTS)
def pair(request, tmp_path_factory):
    path = CHECKPOINTS[request.param](tmp_path_factory.mktemp("checkpoint"))
    core = load_core(path)
    with Engine(path, dtype=core.config.dtype, **LIMITS) as engine:
        yield engine, core


def fresh(engine: Engine) -> Engine:
    assert engine.llm.reset_prefix_cache()
    return engine


def test_class_is_ours(pair):
    assert pair[0].model_class == "isomodels.vllm.model.IsoModelsForCausalLM"


def test_row_21_prompt_lengths_around_a_block(pair):
    """Prompt logprobs used to be misaligned when a prefix of more than a block was cached."""
    engine, core = pair
    fresh(engine)
    for again in range(2):
        requests = [
            Request(draw(n, n), max_tokens=3, temperature=0.0, prompt_logprobs=scored)
            for n in (1, 2, 15, 16, 17, 31, 32, 33)
            for scored in (True, False)
        ]
        results = engine.run(requests, seed=again)
        assert assert_equal_bits(core, results) > 150
        hits = [r.num_cached_tokens for r in results if r.prompt_logprobs is None]
        assert not again or max(hits) == 2 * BLOCK


def test_chunked_prefill(pair):
    engine, core = pair
    results = fresh(engine).run(
        [Request(draw(n, n), max_tokens=2, prompt_logprobs=True) for n in (47, 48, 49, 150)]
    )
    assert {r.prompt_case() for r in results} == {"engine_prefill", "engine_chunked_prefill"}
    assert len(results[-1].chunks) > 3
    assert_equal_bits(core, results)


def test_row_22_scored_prompt_equals_prefix_hit(pair):
    """Requests for prompt logprobs ignore the prefix cache: both ways must give the same bits."""
    engine, core = pair
    prompt = draw(70, 22)
    (first,) = fresh(engine).run([Request(prompt, max_tokens=6, temperature=0.0)])
    (hit,) = engine.run([Request(prompt, max_tokens=6, temperature=0.0)])
    whole = [*prompt, *(t.id for t in first.tokens)]
    (scored,) = engine.run([Request(whole, max_tokens=1, prompt_logprobs=True)])
    assert first.num_cached_tokens == 0 < hit.num_cached_tokens
    assert scored.num_cached_tokens == 0
    decoded = bits([t.logprob for t in first.tokens])
    assert (decoded == bits([t.logprob for t in hit.tokens])).all()
    assert (decoded == bits(scored.prompt_logprobs[-6:])).all()
    assert assert_equal_bits(core, [first, hit, scored])


def test_row_15_shared_prefix(pair):
    """Prompt logprobs of a shared prefix used to differ between two prompts."""
    engine, core = pair
    prefix = draw(40, 15)
    requests = [
        Request(prefix + draw(n, n), max_tokens=1, prompt_logprobs=True, arrival=i)
        for i, n in enumerate((1, 9, 60))
    ]
    results = fresh(engine).run(requests)
    for result in results[1:]:
        shared = [bits(r.prompt_logprobs[:39]) for r in (results[0], result)]
        assert (shared[0] == shared[1]).all()
    assert_equal_bits(core, results)


@pytest.mark.parametrize("others", [0, 1, 7])
def test_row_2_alone_and_beside_prefill_and_decode(pair, others):
    engine, core = pair
    mine = Request(draw(37, 2), max_tokens=12, temperature=0.0)
    noise = [Request(draw(5 + 9 * i, i), max_tokens=9, arrival=2 * i) for i in range(others)]
    results = fresh(engine).run([mine, *noise])
    mixed = [step for step in engine.steps if step.prefill_rows and step.decode_rows]
    assert bool(mixed) == (others > 1) or others == 1
    assert_equal_bits(core, results)


def test_preemption(pair):
    engine, core = pair
    requests = [Request(draw(45 + i, i), max_tokens=40) for i in range(5)]
    results = fresh(engine).run(requests, seed=3)
    assert sum(r.preemptions for r in results) > 0
    assert sum(step.resumed_requests for step in engine.steps) > 0
    cases = {r.case(i) for r in results for i in range(len(r.tokens))}
    assert {"engine_resume", "engine_decode"} <= cases
    assert assert_equal_bits(core, results) == 5 * 40


def test_several_samples_of_one_prompt(pair):
    engine, core = pair
    results = fresh(engine).run([Request(draw(50, 4), max_tokens=8, n=4)], seed=4)
    assert [r.sample for r in results] == [0, 1, 2, 3]
    assert len({tuple(t.id for t in r.tokens) for r in results}) > 1
    assert max(r.num_cached_tokens for r in results) == 3 * BLOCK
    assert_equal_bits(core, results)


def test_row_30_sampling_options_leave_the_raw_logprob(pair):
    """The returned logprob is that of temperature 1, whatever shapes the distribution."""
    from vllm import SamplingParams

    engine, core = pair
    params = [
        SamplingParams(temperature=0.6, top_p=0.5),
        SamplingParams(temperature=1.5, top_k=3),
        SamplingParams(min_p=0.2),
        SamplingParams(temperature=0.7, frequency_penalty=0.3, presence_penalty=0.5),
        SamplingParams(temperature=0.0, logit_bias={7: 50.0}),
        SamplingParams(allowed_token_ids=[1, 2, 3]),
    ]
    for one in params:
        one.max_tokens, one.ignore_eos, one.logprobs, one.detokenize = 6, True, 0, False
    prompt = draw(20, 30)
    outputs = engine.llm.generate(
        [{"prompt_token_ids": prompt}] * len(params), params, use_tqdm=False
    )
    for output in outputs:
        (sample,) = output.outputs
        got = [d[t].logprob for d, t in zip(sample.logprobs, sample.token_ids, strict=True)]
        (scored,) = engine.run([Request([*prompt, *sample.token_ids], prompt_logprobs=True)])
        assert (bits(got) == bits(scored.prompt_logprobs[-6:])).all()
        assert_equal_bits(core, [scored])


def test_top_logprobs_are_the_row(pair):
    """All entries that a request with `logprobs` gets, not only the sampled token's."""
    from vllm import SamplingParams

    engine, core = pair
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=20, detokenize=False)
    for seed in range(4):
        prompt = draw(9, seed)
        (output,) = engine.llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        entries = output.outputs[0].logprobs[0]
        row = core.logprobs(_hidden(core, prompt)[-1:])[0]
        assert len(entries) == 20
        for token, entry in entries.items():
            assert bits([entry.logprob]) == bits([row[token].item()])


def test_abort(pair):
    """An aborted request leaves no trace in its neighbours or in those who get its pages."""
    engine, core = pair
    llm_engine = fresh(engine).llm.llm_engine
    engine._live = {}
    for i in range(3):
        engine._add(i, Request(draw(30 + i, i), max_tokens=10, temperature=0.0))
    done = []
    for step in range(40):
        done += [o for o in llm_engine.step() if o.finished]
        if step == 4:
            llm_engine.abort_request(["1"])
    assert {o.request_id for o in done} == {"0", "2"}
    assert not llm_engine.has_unfinished_requests()
    results = [r for o in done for r in engine._collect(o)]
    assert assert_equal_bits(core, results) == 20
    assert_equal_bits(core, engine.run([Request(draw(60, 9), max_tokens=5)]))


def test_seed_of_a_request(pair):
    """vLLM's CPU engine would end at the first chunk of a longer prompt."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    engine, core = pair
    prompt = {"prompt_token_ids": draw(100, 3)}
    with pytest.raises(VLLMValidationError, match="isomodels: seed"):
        engine.llm.generate(prompt, SamplingParams(seed=1), use_tqdm=False)
    engine.llm.generate(prompt, SamplingParams(seed=1, temperature=0.0), use_tqdm=False)
    runs = [engine.run([Request(draw(20, 3), max_tokens=9)], seed=seed) for seed in (7, 7, 8)]
    ids = [[t.id for t in results[0].tokens] for results in runs]
    assert ids[0] == ids[1] != ids[2]
    assert_equal_bits(core, [results[0] for results in runs])


def test_no_operation_of_vllm_is_built(pair):
    """Row 9 and its like: no layer of vLLM, so no kernel that it might choose."""
    engine, _ = pair
    owners = {type(module).__module__.partition(".")[0] for module in engine._model.modules()}
    assert owners - {"torch"} == {"isomodels"}


def test_profiling_run(pair):
    """vLLM measures memory with a forward that has no pages."""
    engine, _ = pair
    (out,) = engine.llm.collective_rpc(lambda worker: worker.model_runner.profile_run())
    assert out is None


def test_padded_tokens(pair, monkeypatch):
    """vLLM may hand over more rows than tokens, as CUDA graphs need it."""
    from isomodels.batch import Batch
    from isomodels.vllm import model as module
    from isomodels.vllm.attention import StepMetadata

    engine, core = pair
    ours = engine._model
    ids = torch.tensor(draw(9, 1), dtype=torch.int32)
    step = StepMetadata(Batch.packed(torch.tensor([0, 6], dtype=torch.int32)), 6)
    context = SimpleNamespace(attn_metadata={ours.layers[0].name: step})
    monkeypatch.setattr(module, "get_forward_context", lambda: context)
    hidden = ours(ids, torch.arange(9))
    assert hidden.shape == (9, core.config.hidden_size)
    assert torch.equal(hidden[:6], _hidden(core, ids[:6].tolist()))
    assert not hidden[6:].any()


def test_trace_names_every_operation(pair):
    """Hashes depend on the token alone, whether its prompt came in one chunk or in several."""
    engine, core = pair
    prompt = draw(100, 8)
    trace = engine.trace(prompt)
    assert list(trace) == [n for n in trace if n]
    # A qk-norm holds a weight for `rope` and is not called.
    leaves = {
        name
        for name, module in core.named_modules()
        if not list(module.children()) and not name.endswith(("q_norm", "k_norm"))
    }
    assert leaves <= set(trace)
    changed = engine.trace([*prompt[:-1], (prompt[-1] + 1) % 500])
    assert changed["lm_head"] != trace["lm_head"]
    assert engine.trace(prompt) == trace


def test_trace_of_a_decode_step(pair):
    """A sane engine and the module itself give one trace, in one order."""
    engine, core = pair
    for length in (2, 17, 100):
        prompt = draw(length, length)
        decoded = engine.trace(prompt, decode=True)
        assert [(s.prefill_rows, s.decode_rows) for s in engine.steps][-1] == (0, 1)
        with trace_rows(core, -1) as own:
            core.logprobs(_hidden(core, prompt))
        assert list(decoded.items()) == list(own.items()) == list(engine.trace(prompt).items())
    assert decoded != engine.trace([*prompt[:-1], (prompt[-1] + 1) % 500], decode=True)


def test_trace_finds_a_fault_of_decode_steps(pair, monkeypatch):
    from isomodels.layers import attention

    def faulty(q, kv_cache, block_table, cu_seqlens_q, seq_lens, scale, max_q, max_k):
        out = sane(q, kv_cache, block_table, cu_seqlens_q, seq_lens, scale, max_q, max_k)
        ulp = torch.int32 if out.dtype == torch.float32 else torch.int16
        return (out.view(ulp) + 1).view(out.dtype) if max_q == 1 else out

    engine, _ = pair
    prompt, sane = draw(100, 9), attention.paged_attention
    expected = engine.trace(prompt)
    monkeypatch.setattr(attention, "paged_attention", faulty)
    assert engine.trace(prompt) == expected
    decoded = engine.trace(prompt, decode=True)
    first = next(name for name in decoded if decoded[name] != expected[name])
    assert first == "model.layers.0.self_attn.attn"


def test_trace_refuses_what_it_cannot_see(pair, monkeypatch):
    engine, _ = pair
    with pytest.raises(ValueError, match="two token ids"):
        engine.trace([7], decode=True)
    step = engine._step

    def replayed():
        outputs = step()
        engine.steps[-1] = replace(engine.steps[-1], replayed=True)
        return outputs

    monkeypatch.setattr(engine, "_step", replayed)
    with pytest.raises(HostError, match="replayed a CUDA graph"):
        engine.trace([7, 8])


@pytest.mark.parametrize("broken", [False, True])
def test_a_run_without_graphs_brings_them_back(pair, monkeypatch, broken):
    """Both model runners keep one flag, here that of V1; see test_runners.py for a GPU."""
    engine, _ = pair
    dispatcher = engine._runner.cudagraph_dispatcher
    monkeypatch.setattr(dispatcher, "keys_initialized", True)
    step, seen = engine._step, []

    def watched():
        seen.append(dispatcher.keys_initialized)
        if broken:
            raise RuntimeError("broken")
        return step()

    monkeypatch.setattr(engine, "_step", watched)
    for graphs in (False, True):
        with pytest.raises(RuntimeError) if broken else nullcontext():
            engine.run([Request([1, 2, 3])], graphs=graphs)
        assert set(seen) == {graphs}
        assert dispatcher.keys_initialized
        seen.clear()


def test_allowed_token_ids(pair):
    engine, core = pair
    request = Request(draw(20, 3), max_tokens=6, allowed_token_ids=[11, 300])
    results = fresh(engine).run([request], seed=0)
    assert {token.id for token in results[0].tokens} <= {11, 300}
    assert_equal_bits(core, results)


def test_sleep_and_wake(pair):
    """vLLM on CPU keeps everything where it is; what is served afterwards is the same."""
    engine, core = pair
    request = Request(draw(40, 6), max_tokens=4, temperature=0.0)
    (before,) = fresh(engine).run([request])
    engine.llm.sleep(level=1)
    engine.llm.wake_up()
    (after,) = engine.run([request])
    assert after.tokens == before.tokens
    assert_equal_bits(core, [after])


def test_weights_that_a_sleep_discarded_are_not_served(pair):
    engine, core = pair
    engine.llm.sleep(level=1)
    engine.llm.sleep(level=2)  # vLLM does nothing: it sleeps already
    engine.llm.wake_up()
    assert engine._model.refusal is None
    engine.llm.sleep(level=2)
    engine.llm.wake_up()
    with pytest.raises(CheckpointError, match="sleep of level 2: reload them"):
        engine._model.compute_logits(torch.zeros(1, core.config.hidden_size))
    engine.llm.collective_rpc("reload_weights")
    assert_equal_bits(core, engine.run([Request(draw(40, 6), max_tokens=4)]))


def _hidden(core, ids):
    from isomodels.batch import Batch

    cu_seqlens = torch.tensor([0, len(ids)], dtype=torch.int32)
    return core(torch.tensor(ids), torch.arange(len(ids)), Batch.packed(cu_seqlens))
