from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.checkpoints import make_mimo, make_qwen3, make_qwen3_moe

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MAKERS = {
    "qwen3": lambda path, dtype: make_qwen3(path, dtype, tied=False),
    "qwen3_tied": lambda path, dtype: make_qwen3(path, dtype, tied=True),
    "mimo": make_mimo,
    "qwen3_moe": make_qwen3_moe,
}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """checkpoint("qwen3", "fp32") -> folder, made once."""
    made: dict[tuple[str, str], Path] = {}

    def get(kind: str, dtype: str) -> Path:
        key = (kind, dtype)
        if key not in made:
            path = tmp_path_factory.mktemp("checkpoints") / f"{kind}_{dtype}"
            made[key] = MAKERS[kind](path, DTYPES[dtype])
        return made[key]

    return get


@pytest.fixture(scope="session")
def sequences() -> list[list[int]]:
    """Ragged, with a repeated sequence and lengths beside the kernels' tiles and blocks."""
    generator = torch.Generator().manual_seed(7)
    lengths = (2, 1, 17, 64, 65, 3, 130)
    drawn = [torch.randint(512, (n,), generator=generator).tolist() for n in lengths]
    return [*drawn, drawn[2]]
