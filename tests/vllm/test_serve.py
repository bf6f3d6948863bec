"""`vllm serve CHECKPOINT --model-impl isomodels`, over HTTP."""

import os
import signal
import socket
import subprocess
import sys
import time

import httpx
import pytest
import torch

from isomodels.batch import Batch
from isomodels.contract import Contract, contract_of, require_same
from isomodels.trace import Recording, compare, record
from isomodels.vllm import Result, Token
from isomodels.vllm.versions import V2_RUNNER_VERSIONS, vllm_version
from tests.checkpoints import make_qwen3
from tests.vllm import support
from tests.vllm.support import assert_equal_bits, bits, draw

ON_GPU = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu] if ON_GPU else []

SIZES = {"num_hidden_layers": 2}
NAME = "tiny"
OPTIONS = f"""--model-impl isomodels --served-model-name {NAME} --dtype bfloat16 --max-model-len 256
    --max-num-batched-tokens 64 --block-size 16 --enable-prompt-tokens-details""".split()
if ON_GPU:  # beside other processes
    OPTIONS += ["--gpu-memory-utilization", "0.02", "--kv-cache-memory-bytes", "64M"]
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_PLUGINS": "isomodels",
    "HF_HUB_OFFLINE": "1",
    # Other tests of this process have set them to other values.
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
}


def load_core(path):
    return support.load_core(path, "cuda" if ON_GPU else "cpu")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("serve")
    return [
        make_qwen3(root / str(seed), torch.bfloat16, tied=True, seed=seed, **SIZES)
        for seed in (0, 1)
    ]


@pytest.fixture(scope="module")
def server(checkpoints, tmp_path_factory):
    """(client, log file) of a live server."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("log") / "serve.log"
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(checkpoints[0])]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port), *OPTIONS],
            env={**os.environ, **ENVIRONMENT},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            _await_health(client, process, log)
            yield client, log
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _await_health(client, process, log):
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            if client.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise TimeoutError(log.read_text()[-3000:])


def complete(client, prompt, **fields):
    body = {"model": NAME, "prompt": prompt, "max_tokens": 8, "logprobs": 0, "ignore_eos": True}
    body |= {"return_tokens_as_token_ids": True, **fields}
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def results_of(answer, prompt):
    results = []
    for choice in answer["choices"]:
        logprobs = choice["logprobs"]
        ids = [int(token.removeprefix("token_id:")) for token in logprobs["tokens"]]
        tokens = [
            Token(i, value, 0, 0, 0, 0)
            for i, value in zip(ids, logprobs["token_logprobs"], strict=True)
        ]
        result = Result(0, choice["index"], tuple(prompt), tokens)
        if choice.get("prompt_logprobs"):
            entries = choice["prompt_logprobs"][1:]
            result.prompt_logprobs = [
                entry[str(i)]["logprob"] for entry, i in zip(entries, prompt[1:], strict=True)
            ]
        results.append(result)
    return results


def cached_tokens(answer):
    return (answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0


def test_class_is_ours(server):
    assert "Resolved architecture: IsoModelsQwen3ForCausalLM" in server[1].read_text()


def test_completions(server, checkpoints):
    client, _ = server
    prompt = draw(100, 1)
    answer = complete(client, prompt, n=3, temperature=0.8, top_p=0.9, prompt_logprobs=0, seed=None)
    results = results_of(answer, prompt)
    assert len(results) == 3
    assert assert_equal_bits(load_core(checkpoints[0]), results) == 3 * (8 + 99)


def test_chat_completions(server, checkpoints):
    client, _ = server
    body = {
        "model": NAME,
        "messages": [{"role": "user", "content": "t1 t2 t3 t4 t5"}],
        "max_tokens": 5,
        "logprobs": True,
        "top_logprobs": 2,
        "return_token_ids": True,
        "ignore_eos": True,
    }
    answer = client.post("/v1/chat/completions", json=body).json()
    (choice,) = answer["choices"]
    values = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    pairs = zip(choice["token_ids"], values, strict=True)
    tokens = [Token(i, value, 0, 0, 0, 0) for i, value in pairs]
    result = Result(0, 0, tuple(answer["prompt_token_ids"]), tokens)
    assert assert_equal_bits(load_core(checkpoints[0]), [result]) == 5


@pytest.mark.skipif(ON_GPU, reason="a GPU honours it")
def test_seed_is_a_bad_request(server):
    """It would end the engine; a refusal must leave it alive."""
    client, _ = server
    body = {"model": NAME, "prompt": draw(90, 5), "max_tokens": 2, "seed": 3}
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 400
    assert "isomodels: seed cannot be used" in response.text
    complete(client, draw(90, 5))


def test_streams_and_abort(server, checkpoints):
    """A client that hangs up leaves no trace in the next answer."""
    client, _ = server
    prompt = draw(80, 2)
    body = {"model": NAME, "prompt": prompt, "max_tokens": 150, "stream": True}
    with client.stream("POST", "/v1/completions", json={**body, "ignore_eos": True}) as stream:
        next(stream.iter_lines())
    answer = complete(client, prompt, temperature=0.0)
    assert_equal_bits(load_core(checkpoints[0]), results_of(answer, prompt))


def test_reload_over_http(server, checkpoints):
    """The door of RL trainers: no prefix of the old weights is served afterwards.

    Row 29: a tied head goes stale after a weight update where an engine keeps a copy of it.
    """
    client, _ = server
    prompt = draw(70, 3)
    cores = [load_core(path) for path in checkpoints]
    complete(client, prompt, temperature=0.0)
    hit = complete(client, prompt, temperature=0.0)
    assert cached_tokens(hit) == 64
    try:
        assert reload(client, checkpoints[1]) == 200
        after = complete(client, prompt, temperature=0.0)
        assert cached_tokens(after) == 0
        assert_equal_bits(cores[1], results_of(after, prompt))
    finally:
        assert reload(client, checkpoints[0]) == 200
    assert_equal_bits(cores[0], results_of(hit, prompt))
    again = complete(client, prompt, temperature=0.0)
    first, second = (r.tokens for a in (hit, again) for r in results_of(a, prompt))
    assert (bits([t.logprob for t in first]) == bits([t.logprob for t in second])).all()


def test_the_contract_over_http(server, checkpoints):
    """By vLLM's own route for any call, and by a route of its own where vLLM has such plug-ins."""
    client, _ = server
    asked = client.post("/collective_rpc", json={"method": "isomodels_contract"})
    (text,) = asked.json()["results"]
    engine = Contract.from_json(text)
    trainer = contract_of(checkpoints[0], "cuda" if ON_GPU else "cpu")
    require_same(trainer, engine)
    assert engine.deployment["host"]["name"] == "vllm"
    if vllm_version() in V2_RUNNER_VERSIONS:
        assert client.get("/isomodels/contract").text == text


def test_a_recording_over_http(server, checkpoints, tmp_path):
    client, _ = server

    def ask(method, **kwargs):
        answer = client.post("/collective_rpc", json={"method": method, "kwargs": kwargs})
        assert answer.status_code == 200, answer.text
        return answer.json()["results"][0]

    ask("isomodels_trace_start", positions="3,10:")
    prompt = draw(20, 7)
    answer = complete(client, prompt, temperature=0.0)
    made = ask("isomodels_trace_stop", path=str(tmp_path / "engine"))
    assert made == {"tokens": 1 + 10 + 7, "sequences": 1}
    (result,) = results_of(answer, prompt)
    ids = torch.tensor([*prompt, *(token.id for token in result.tokens)])
    bounds = torch.tensor([0, len(ids)], dtype=torch.int32)
    core = load_core(checkpoints[0])
    device = core.head_weight.device
    with record(core, tmp_path / "module"):
        core(ids.to(device), torch.arange(len(ids), device=device), Batch.packed(bounds.to(device)))
    found = compare(*(Recording.load(tmp_path / name) for name in ("engine", "module")))
    assert (found.tokens, found.differing) == (18, 0)


def test_refused_reload_over_http(server, checkpoints, tmp_path):
    client, log = server
    path = make_qwen3(tmp_path, torch.bfloat16, tied=True, **{**SIZES, "rope_theta": 5})
    assert reload(client, path) == 500
    assert "config.json differs from the one the engine started with" in log.read_text()
    assert reload(client, tmp_path / "absent") == 500
    assert f"CheckpointError: there is no folder {tmp_path / 'absent'}\n" in log.read_text()
    prompt = draw(33, 4)
    answer = complete(client, prompt, temperature=0.0)
    assert_equal_bits(load_core(checkpoints[0]), results_of(answer, prompt))


def reload(client, path):
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}
    # An answer of 500 ends the connection, so it must not be one that others use.
    headers = {"Connection": "close"}
    return client.post("/collective_rpc", json=body, headers=headers).status_code
