"""A trainer on a GPU and an engine in another process, through CUDA IPC."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="vllm is not installed")

from isomodels.contract import contract_of
from isomodels.errors import CheckpointError
from isomodels.layers.parallel import named_tensors
from isomodels.sync import CudaIpc
from isomodels.sync.blocks import Whole
from isomodels.vllm import Engine, LLMSyncClient, Request
from tests.checkpoints import make_qwen3
from tests.sync import support
from tests.vllm.support import assert_equal_bits, draw, load_core

gpu = pytest.mark.gpu


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("ipc")
    folders = [make_qwen3(root / str(seed), torch.bfloat16, seed=seed) for seed in (0, 1)]
    for folder in folders:
        torch.save(dict(named_tensors(load_core(folder))), folder / "tensors.pt")
    return folders


@pytest.fixture(scope="module")
def engine(folders: list[Path]) -> Iterator[Engine]:
    with Engine(
        folders[0],
        dtype="bfloat16",
        max_model_len=256,
        num_gpu_blocks_override=64,
        gpu_memory_utilization=0.02,  # only asked to be free: others may use the GPU too
        kv_cache_memory_bytes=1 << 28,
        enforce_eager=False,
        weight_transfer_config={"backend": "isomodels"},
    ) as engine:
        yield engine


@gpu
@pytest.mark.parametrize("killed", [None, *support.CALLS])
def test_weights_by_cuda_ipc(engine, folders, killed):
    """In place under CUDA graphs; a trainer that dies in any call leaves one set of weights."""
    files = [str(folder / "tensors.pt") for folder in folders]
    client = LLMSyncClient(engine.llm)
    contract = contract_of(folders[0], "cuda")
    process, pipe = support.start(contract.to_json(), files, "cuda_ipc", 1)
    for number in (0, 1):
        pipe.send(number)

        def kill(name: str, number: int = number) -> None:
            if number and name == killed:
                process.kill()
                process.join()

        ended = support.serve(pipe, client, kill)
        assert ended == ("done" if number == 0 or killed is None else "gone")
        if engine._model.refusal is not None:  # killed while the engine read its memory
            with pytest.raises(CheckpointError):
                engine._model.compute_logits(torch.zeros(1, 128, device="cuda"))
            break
        serving = number and killed in (None, "finish_weight_update")
        assert client.weight_version() == f"step {int(serving)}"
        results = engine.run([Request(draw(n, n), max_tokens=8) for n in (40, 17, 5)])
        assert any(step.replayed for step in engine.steps)
        assert_equal_bits(load_core(folders[int(serving)], "cuda"), results)
    process.kill()


def test_weights_on_the_cpu_have_no_handle():
    offer = CudaIpc().offer([Whole("a", torch.zeros(3))])
    with pytest.raises(CheckpointError, match="a is not on a GPU: send it through"):
        offer.__enter__()
