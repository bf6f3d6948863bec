from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from isomodels.parity.checkpoints import random_checkpoint, tiny_config
from isomodels.parity.ranks import Ranks

CORE = "tests.parallel.core_rank:CoreRank"
TRAINER = "tests.parallel.trainer_rank:TrainerRank"


@pytest.fixture(scope="session", autouse=True)
def _importable(pytestconfig: pytest.Config) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(pytestconfig.rootpath))
        yield


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    """Four processes over gloo that run the module itself."""
    with Ranks("core", CORE, 4) as ranks:
        ranks.results()
        yield ranks


@pytest.fixture(scope="session")
def eight_ranks() -> Iterator[Ranks]:
    """Eight of them: two share each leaf of K."""
    with Ranks("core", CORE, 8) as ranks:
        ranks.results()
        yield ranks


@pytest.fixture(scope="session")
def trainers() -> Iterator[Callable[[int], Ranks]]:
    """trainers(n) -> n ranks that open trainers, started once."""
    started: dict[int, Ranks] = {}

    def get(count: int) -> Ranks:
        if count not in started:
            started[count] = Ranks("trainer", TRAINER, count)
            started[count].results()
        return started[count]

    yield get
    for ranks in started.values():
        ranks.close()


@pytest.fixture(scope="session")
def sequences() -> list[list[int]]:
    """Lengths that no number of ranks divides; one without a target."""
    generator = torch.Generator().manual_seed(7)
    lengths = (2, 17, 64, 5, 33, 1, 40)
    return [torch.randint(1003, (n,), generator=generator).tolist() for n in lengths]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """tiny(architecture, dtype, **fields of config.json) -> checkpoint, made once."""
    made: dict[tuple, Path] = {}

    def get(architecture: str, dtype: str, **fields: object) -> Path:
        key = (architecture, dtype, *sorted(fields.items()))
        if key not in made:
            folder = tmp_path_factory.mktemp("tiny") / "checkpoint"
            raw = {**tiny_config(architecture), "num_hidden_layers": 2, **fields}
            made[key] = random_checkpoint(folder, raw, dtype, seed=1)
        return made[key]

    torch.set_num_threads(1)
    return get
