import json
import sys
from types import SimpleNamespace

import pytest
import torch

from benchmarks import engine, engine_worker, qwen3_8b
from benchmarks.engine_worker import StepProfile
from benchmarks.harness import ROWS
from benchmarks.served import MODELS
from isomodels.checkpoint import load_checkpoint
from isomodels.config import read_config
from isomodels.validate.bits import bits

QWEN3 = MODELS["qwen3-8b"]
SMALL = {
    "vocab_size": 503,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def test_the_checkpoint_is_whole_and_in_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(qwen3_8b, "SHARD_BYTES", 2**18)
    raw = qwen3_8b.config(1, **SMALL)
    model = load_checkpoint(qwen3_8b.write_checkpoint(tmp_path / "a", raw, "cpu"))
    assert len(list((tmp_path / "a").glob("*.safetensors"))) > 1
    again = load_checkpoint(qwen3_8b.write_checkpoint(tmp_path / "b", raw, "cpu"))
    other = load_checkpoint(qwen3_8b.write_checkpoint(tmp_path / "c", raw, "cpu", seed=1))
    for name, value in model.state_dict().items():
        assert value.float().std() > 0
        assert torch.equal(bits(value), bits(again.state_dict()[name]))
        assert not torch.equal(value, other.state_dict()[name])


def test_the_cadence_is_of_steps_that_decode_all_requests():
    steps = [(64, 4, 0.0), (8, 8, 1.0), (8, 8, 1.5), (8, 8, 2.25), (7, 7, 9.0), (8, 8, 9.5)]
    assert engine.decode_step_ms(steps, 8) == 625.0


def chosen(**changed) -> dict:
    same = dict.fromkeys(engine.SAME, 1)
    told = dict.fromkeys(("attention", "compilation", "cudagraphs"), "NONE")
    return {
        "chosen": {**told, **same, **changed},
        "seconds": [2.0, 2.1, 1.9],
        "prefill_seconds": [1.0, 1.0, 1.0],
        "decode_step_ms": 4.0,
    }


def test_lines_of_the_table():
    load = engine.Load(requests=10, tokens_in=3, tokens_out=4)
    stock = {**chosen(), "seconds": [1.0, 1.0, 1.0], "decode_step_ms": 3.0}
    whole, prefill, step = engine.compare(chosen(), stock, load, QWEN3, 36, "vLLM")
    assert (whole.ratio, whole.floor) == (0.5, 0.95)
    assert "20 against 40 tokens/s out" in whole.note
    assert (prefill.ratio, step.ratio) == (1.0, 0.75)


@pytest.mark.parametrize("name", engine.SAME)
def test_schedulers_that_differ_are_refused(name):
    with pytest.raises(RuntimeError, match=f"not the same scheduler: {name} is 2 for isomodels, 1"):
        engine.compare(chosen(**{name: 2}), chosen(), engine.Load(), QWEN3, 36, "vLLM")


def test_steps_to_profile(monkeypatch):
    seen = []
    monkeypatch.setattr(StepProfile, "_start", lambda self: seen.append("start"))
    profile = StepProfile(min_tokens=8, requests=8, skip=1, count=2)
    for step in ((4, 8), (8, 7), (8, 8)):
        profile.before(*step)
    assert not seen
    profile.before(9, 8)
    assert seen == ["start"]
    json.dumps(profile.result)


def test_compilations_are_told(monkeypatch):
    knobs = pytest.importorskip("triton").knobs
    heard, names = [], []
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **event: heard.append(event))
    engine_worker._tell_compilations(names)
    knobs.runtime.jit_post_compile_hook(fn=SimpleNamespace(name="a.b._gemm"), key="k")
    assert names == ["_gemm"]
    assert len(heard) == 1


class FakeEngine:
    """Takes vLLM's arguments and answers as a worker without steps would."""

    def __init__(self, checkpoint, **arguments):
        type(self).given = arguments

    def collective_rpc(self, name, args=()):
        return ["{}" if name in ("chosen", "take_profile") else "[]"]


@pytest.mark.parametrize(
    ("contestant", "expected"),
    [
        ("stock", {"a": 1}),
        ("stock-tuned", {"a": 1}),
        ("stock-v1", {"a": 1}),
        ("ours", {"model_impl": "isomodels"}),
    ],
)
def test_stock_alone_gets_its_own_arguments(monkeypatch, tmp_path, contestant, expected):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=FakeEngine))
    monkeypatch.setattr(engine, "generate", lambda *args, **more: 1.0)
    monkeypatch.setattr(engine, "tuned_experts", lambda folder: folder)
    for name in ("VLLM_USE_V2_MODEL_RUNNER", "VLLM_TUNED_CONFIG_FOLDER"):
        monkeypatch.setenv(name, "1")  # put back afterwards
    load = engine.Load(requests=3, stock={"a": 1})
    engine.serve(contestant, tmp_path, load)
    common = {**engine.ENGINE, "max_num_seqs": 3}
    assert {k: v for k, v in FakeEngine.given.items() if k not in common} == expected
    assert FakeEngine.given.items() >= common.items()


@pytest.mark.slow  # imports vLLM
def test_experts_of_a_device_without_files_are_those_of_an_h100(monkeypatch, tmp_path):
    pytest.importorskip("vllm")
    from vllm.model_executor.layers.fused_moe import fused_moe

    monkeypatch.setattr(fused_moe, "get_device_name_as_file_name", lambda: "NVIDIA_H200")
    names = {path.name for path in engine.tuned_experts(tmp_path).iterdir()}
    assert "E=256,N=512,device_name=NVIDIA_H200.json" in names
    assert "E=512,N=512,device_name=NVIDIA_H200.json" not in names  # which vLLM ships
    monkeypatch.setenv("VLLM_TUNED_CONFIG_FOLDER", str(tmp_path))
    found = fused_moe.get_moe_configs.__wrapped__(256, 512, None)
    assert found[16]["BLOCK_SIZE_M"] == 16
    assert max(found) >= 4096


def test_the_hybrid_keeps_the_share_of_its_layers():
    served = MODELS["qwen3.5-35b-a3b"]
    for layers in (served.layers, 40):
        _, config = read_config(served.config(layers))
        counts = [len(config.layers_of(kind)) for kind in ("linear_attention", "full_attention")]
        assert counts == [3 * layers // 4, layers // 4]
        assert config.mtp_num_hidden_layers == 0


def test_backends_are_told_with_what_they_chose():
    def layer(name, **more):
        backend = SimpleNamespace(get_name=lambda: name)
        return SimpleNamespace(get_attn_backend=lambda: backend, **more)

    assert engine_worker._backend(layer("TRITON_MLA")) == "TRITON_MLA"
    recurrent = layer("GDN_ATTN", gdn_prefill_backend="triton")
    assert engine_worker._backend(recurrent) == "GDN_ATTN triton"


@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_a_row_of_its_own_and_any_depth(name):
    served = MODELS[name]
    assert served.row in ROWS
    _, config = read_config(served.config(5))
    assert config.num_hidden_layers == 5
    assert served.shape(5) == f"{served.name}, 5 layers"
    assert len({one.row for one in MODELS.values()}) == len(MODELS)
