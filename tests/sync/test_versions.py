"""The version of the weights that computed each token, and a sync in the middle of an answer."""

import pytest
import torch

pytest.importorskip("vllm", reason="vllm is not installed")

from vllm import SamplingParams

from isomodels.contract import contract_of
from isomodels.sync import WeightSender
from isomodels.vllm import LLMSyncClient, Request
from tests.sync.test_engine import weights
from tests.vllm.support import bits, draw, load_core, packed_logprobs


def test_tokens_and_logprobs_bear_the_version_that_computed_them(engine, folders):
    """Tokens before a sync have the old weights' bits and label, those after it the new ones'."""
    client = LLMSyncClient(engine.llm)
    sender = WeightSender(client, contract_of(folders[0]))
    sender.send(weights(folders[0]), "old")
    assert client.weight_version() == "old"
    prompt = draw(40, 5)
    params = SamplingParams(max_tokens=8, ignore_eos=True, logprobs=0, detokenize=False)
    core = engine.llm.llm_engine
    core.add_request("mid", {"prompt_token_ids": prompt}, params)
    for _ in range(3):
        core.step()
    sent = sender.send(weights(folders[1]), "new")
    assert sent.version == client.weight_version() == "new"
    assert (sent.transport, sent.bytes > 0, sent.seconds > 0) == ("shared_memory", True, True)
    assert "GB by shared_memory" in str(sent)
    done = []
    while core.has_unfinished_requests():
        done += [output for output in core.step() if output.finished]
    (answer,) = done[0].outputs
    spans = [(span.version, span.start, span.end) for span in answer.weight_versions]
    assert spans == [("old", 0, 3), ("new", 3, 8)]
    ids = list(answer.token_ids)
    entries = zip(answer.logprobs, ids, strict=True)
    got = bits([entry[token].logprob for entry, token in entries])
    by_version = {}
    for version, folder in zip(("old", "new"), folders, strict=True):
        (rows,) = packed_logprobs(load_core(folder), [[*prompt, *ids]], [1.0])
        chosen = rows[:-1].gather(1, torch.tensor([*prompt, *ids][1:])[:, None])[:, 0]
        by_version[version] = bits(chosen[-len(ids) :])
    for version, start, end in spans:
        assert (got[start:end] == by_version[version][start:end]).all()
    assert (by_version["old"] != by_version["new"]).any()
    sender.send(weights(folders[0]), "old again")


def test_a_sync_drops_the_prefix_cache(engine, folders):
    prompt = Request(draw(100, 9), max_tokens=1)
    engine.run([prompt])
    assert engine.run([prompt])[0].num_cached_tokens > 0
    WeightSender(LLMSyncClient(engine.llm), contract_of(folders[0])).send(
        weights(folders[0]), "again"
    )
    assert engine.run([prompt])[0].num_cached_tokens == 0
