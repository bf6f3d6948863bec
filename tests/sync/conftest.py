from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.checkpoints import make_qwen3


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two checkpoints of one config."""
    root = tmp_path_factory.mktemp("sync")
    return [make_qwen3(root / str(seed), torch.bfloat16, seed=seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def engine(folders: list[Path]) -> Iterator[object]:
    """An engine of the first, in this process."""
    pytest.importorskip("vllm", reason="vllm is not installed")
    from isomodels.vllm import Engine

    with Engine(
        folders[0],
        dtype="bfloat16",
        max_model_len=256,
        num_gpu_blocks_override=64,
        block_size=16,
        enable_prefix_caching=True,
        weight_transfer_config={"backend": "isomodels"},
    ) as engine:
        yield engine
