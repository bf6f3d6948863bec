"""The hybrids in the real engine and the real trainer."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from isomodels.errors import UnsupportedError
from isomodels.parity.checkpoints import tiny_config
from tests.kernel.battery import assert_same_bits

ISOMODELS = Path(sys.executable).with_name("isomodels")
LIMITS = {
    "max_model_len": 256,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 4,
    "enable_prefix_caching": True,
    "enable_chunked_prefill": True,
    "num_gpu_blocks_override": 20,
    "skip_tokenizer_init": True,
}


def draw(count, seed=0):
    return torch.randint(500, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize(
    ("name", "dtype", "block"),
    [
        pytest.param("qwen3_5", torch.bfloat16, 16, id="qwen3_5"),
        pytest.param("multimodal", torch.float32, 48, id="multimodal", marks=pytest.mark.slow),
    ],
)
def test_engine(checkpoint, ours, name, dtype, block):
    pytest.importorskip("vllm")
    from isomodels.vllm import Engine, Request
    from tests.vllm.support import assert_equal_bits

    folder, core = checkpoint(name, dtype), ours(name, dtype)
    shared = draw(150, seed=9)
    with Engine(folder, dtype=str(dtype)[6:], block_size=block, **LIMITS) as engine:
        assert engine.model_class == "isomodels.vllm.recurrent.IsoModelsHybridForCausalLM"
        cache = engine._engine.vllm_config.cache_config
        assert cache.mamba_cache_mode == "align"
        layer = engine._model.layers[-1]
        # row 47: the state, the rows of its chunk and their decays are float32
        dtypes = [tensor.dtype for tensor in layer.states()]
        assert dtypes == [dtype, torch.float32, dtype, torch.float32, torch.float32]
        results = engine.run(
            [
                Request(draw(n, seed=n), max_tokens=12, prompt_logprobs=True, arrival=i)
                for i, n in enumerate((1, 3, 63, 64, 65, 130))
            ]
        )
        assert assert_equal_bits(core, results) > 300
        assert any(len(result.chunks) > 1 for result in results)
        # row 48: a hit at the edge of a block, which need be none of a chunk of the rule
        results = engine.run(
            [Request(shared + draw(5 + i, seed=i), max_tokens=70, arrival=6 * i) for i in range(5)]
        )
        assert_equal_bits(core, results)
        hits = {result.num_cached_tokens for result in results} - {0}
        assert hits
        assert all(hit % cache.block_size == 0 for hit in hits)
        assert any(hit % 64 for hit in hits)
        results = engine.run([Request(draw(70 + i, seed=i), max_tokens=150) for i in range(4)])
        assert_equal_bits(core, results)
        assert sum(result.preemptions for result in results)
    assert core.model.layers[0].linear_attn.gates.A_log.dtype == torch.float32


def test_the_tensors_of_a_state_lie_apart_in_its_block():
    pytest.importorskip("vllm")
    from isomodels.vllm.recurrent import StateLayer

    layout = (((3, 5), torch.bfloat16), ((2, 3), torch.float32), ((7,), torch.bfloat16))
    layer = StateLayer("name", layout)
    ((size,),) = layer.get_state_shape()
    assert size == 32 + 32 + 16  # each padded to 16 bytes
    for _ in range(2):  # vLLM may bind memory twice
        pages = torch.zeros(4, size + 48, dtype=torch.uint8)
        layer.kv_cache = (pages[:, :size],)
        states = layer.states()
        assert layer.states() is states
        assert [(x.shape[1:], x.dtype) for x in states] == [*layout]
        for i, x in enumerate(states):
            x[2].fill_(i + 1)
        for i, x in enumerate(states):
            assert (x[2] == i + 1).all()
            assert not x[[0, 1, 3]].any()
            assert x.data_ptr() % 16 == pages.data_ptr() % 16
        assert pages[2].any()  # of this binding, not of the one before
        assert not pages[:, size:].any()


def test_attention_layers_over_several_caches_are_refused_at_start():
    # A step has one table of blocks for all of them.
    pytest.importorskip("vllm")
    from isomodels.vllm.attention import BatchBuilder, CacheLayer
    from isomodels.vllm.recurrent import StateLayer

    layers = {str(i): CacheLayer(str(i), 2, 64, torch.float32) for i in range(3)}
    layers["3"] = StateLayer("3", (((2,), torch.float32),))
    compilation = SimpleNamespace(static_forward_context=layers)
    config = SimpleNamespace(compilation_config=compilation)
    assert len(BatchBuilder(None, ["0", "1", "2"], config, None).layers) == 3
    with pytest.raises(UnsupportedError, match="split the attention layers over several caches"):
        BatchBuilder(None, ["0", "1"], config, None)


@pytest.mark.slow
def test_engine_without_prefix_caching(checkpoint, ours):
    # vLLM then keeps one block a sequence and never copies it.
    pytest.importorskip("vllm")
    from isomodels.vllm import Engine, Request
    from tests.vllm.support import assert_equal_bits

    folder, core = checkpoint("qwen3_next"), ours("qwen3_next")
    limits = {**LIMITS, "enable_prefix_caching": False}
    with Engine(folder, dtype="float32", **limits) as engine:
        assert engine._engine.vllm_config.cache_config.mamba_cache_mode == "none"
        lengths = (1, 40, 100, 70, 3)
        requests = [
            Request(draw(n, seed=n), max_tokens=30, arrival=i) for i, n in enumerate(lengths)
        ]
        results = engine.run(requests)
        assert_equal_bits(core, results)
        assert {len(result.chunks) for result in results} >= {1, 2}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"mamba_ssm_cache_dtype": "bfloat16"}, "--mamba-ssm-cache-dtype bfloat16"),
        ({"mamba_ssm_cache_dtype": "float16"}, "--mamba-ssm-cache-dtype float16"),
        ({"mamba_cache_dtype": "float16"}, "--mamba-cache-dtype float16"),
        ({"use_replayssm": True}, "--use-replayssm"),
        ({"dtype": "float32"}, "--dtype bfloat16"),
    ],
)
def test_rows_47_and_49_of_the_field_reports_another_state_is_refused(checkpoint, options, named):
    pytest.importorskip("vllm")
    from vllm.engine.arg_utils import EngineArgs

    given = {"dtype": "bfloat16", "max_model_len": 256, "model_impl": "isomodels", **options}
    args = EngineArgs(model=str(checkpoint("qwen3_5", torch.bfloat16)), **given)
    with pytest.raises(Exception, match=rf"isomodels: .*{named}"):
        args.create_engine_config()


@pytest.mark.parametrize(("asked", "cached"), [("none", True), ("align", True), ("none", False)])
def test_how_states_are_cached_is_chosen_before_vllm_chooses(asked, cached):
    """Some versions have a mode "all", of states at every block, and take it where they can."""
    pytest.importorskip("vllm")
    from isomodels.vllm.recurrent import prepare

    cache = SimpleNamespace(
        mamba_ssm_cache_dtype="auto",
        mamba_cache_dtype="auto",
        mamba_cache_mode=asked,
        enable_prefix_caching=cached,
    )
    model = SimpleNamespace(dtype=torch.float32, hf_config=None, hf_text_config=None)
    config = SimpleNamespace(cache_config=cache, model_config=model)
    prepare(config)
    assert cache.mamba_cache_mode == ("align" if cached else "none")
    cache.mamba_cache_mode = "all"
    with pytest.raises(UnsupportedError, match="--mamba-cache-mode all is not supported"):
        prepare(config)


@pytest.fixture
def sequences():
    return [draw(n, seed=n) for n in (2, 1, 17, 64, 65, 3, 130)]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param("qwen3_5", torch.bfloat16, id="qwen3_5"),
        pytest.param("qwen3_next", torch.float32, id="qwen3_next", marks=pytest.mark.slow),
    ],
)
def test_trainer(checkpoint, ours, sequences, name, dtype):
    pytest.importorskip("megatron.core")
    from isomodels.megatron import Trainer
    from tests.hybrid.models import run_packed

    with Trainer(checkpoint(name, dtype), dtype=dtype, recompute=True, max_tokens=200) as trainer:
        # row 46: through Megatron's own wrappers
        pinned = {n: p for n, p in trainer.core.named_parameters() if p.dtype == torch.float32}
        if dtype == torch.bfloat16:
            assert len(pinned) == 9
        model = ours(name, dtype)
        alone = []
        for ids in map(torch.tensor, sequences):
            hidden = run_packed(model, ids)
            alone.append(model.token_logprobs(hidden[:-1], ids[1:]))
        for way in (trainer.score, trainer.recompute_logprobs):
            for i, (mine, one) in enumerate(zip(way(sequences), alone, strict=True)):
                assert_same_bits(mine, one, f"{way.__name__}, sequence {i}")
        before = {n: p.detach().clone() for n, p in trainer.core.named_parameters()}
        first, second = (trainer.step(sequences).loss for _ in range(2))
        assert second < first
        for n, p in trainer.core.named_parameters():
            assert not torch.equal(p, before[n]), f"{n} was not trained"
            assert p.dtype == before[n].dtype


@pytest.mark.parametrize("name", ["qwen3_5"])
def test_resumed_training_equals_uninterrupted(checkpoint, tmp_path, sequences, name):
    pytest.importorskip("megatron.core")
    from isomodels.megatron import Trainer

    folder = checkpoint(name, torch.bfloat16)

    def weights(trainer):
        return {n: p.detach().clone() for n, p in trainer.core.named_parameters()}

    with Trainer(folder, dtype=torch.bfloat16, lr=3e-3) as trainer:
        trainer.step(sequences)
        trainer.save(tmp_path / "saved")
        trainer.step(sequences)
        expected = weights(trainer)
    with Trainer(folder, dtype=torch.bfloat16, lr=3e-3) as trainer:
        trainer.load(tmp_path / "saved")
        trainer.step(sequences)
        for n, tensor in weights(trainer).items():
            assert_same_bits(tensor, expected[n], n)


def test_a_save_that_megatron_cannot_make_is_refused(checkpoint, tmp_path):
    pytest.importorskip("megatron.core")
    from isomodels.megatron import Trainer

    folder = checkpoint("qwen3_5", torch.bfloat16)
    with (
        Trainer(folder, dtype=torch.bfloat16, distributed_optimizer=False) as trainer,
        pytest.raises(UnsupportedError, match="use the distributed optimizer"),
    ):
        trainer.save(tmp_path / "saved")


# One of each kind in every run of the suite, the rest where there is time.
OFTEN = ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3NextForCausalLM")
SELDOM = ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration")
WHOLE: dict[str, int] = {}
# One layer of each kind. Several recurrent ones for one of attention, which vLLM gives groups of
# blocks: Qwen3_5Moe's, and all of them where there is time.
SMALL = {"num_hidden_layers": 2, "full_attention_interval": 2}


@pytest.mark.parametrize(
    ("arch", "dtype", "layers"),
    [
        ("Qwen3_5ForCausalLM", "bfloat16", SMALL),
        ("Qwen3_5MoeForCausalLM", "bfloat16", WHOLE),
        ("Qwen3NextForCausalLM", "bfloat16", SMALL),
        *(pytest.param(arch, "float32", WHOLE, marks=pytest.mark.slow) for arch in OFTEN),
        *(
            pytest.param(arch, dtype, WHOLE, marks=pytest.mark.slow)
            for arch in SELDOM
            for dtype in ("float32", "bfloat16")
        ),
    ],
)
def test_parity(tmp_path, arch, dtype, layers):
    pytest.importorskip("vllm")
    pytest.importorskip("megatron.core")
    file = tmp_path / "report.json"
    (tmp_path / "config.json").write_text(
        json.dumps({**tiny_config(arch), **layers, "dtype": dtype})
    )
    options = ["--config", str(tmp_path), "--arch", arch, "--dtype", dtype, "--no-stock"]
    done = subprocess.run(
        [str(ISOMODELS), "parity", *options, "--workload", "short", "--json", str(file)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(file.read_text())
    assert sum(case["differ"] for case in report["cases"].values()) == 0
    assert sum(case["compared"] for case in report["cases"].values()) > 20_000
