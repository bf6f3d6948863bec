"""One thread a process, here and in all that tests start; the longest files first."""

import os
from pathlib import Path

import pytest

# Before torch is imported. That no bit depends on it: test_surroundings.py, test_invariance.py.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Minutes each: begun first, no worker is left alone with one at the end (`--dist loadfile`).
LONGEST = (
    "hybrid/test_hosts.py",
    "parity/test_parity.py",
    "parallel/test_engine.py",
    "parallel/test_reshard.py",
    "parallel/test_trainer.py",
    "parallel/test_parity.py",
    "validate/test_battery.py",
    "kernel/test_triton_interpreter.py",
    "vllm/test_runners.py",
    "trace/test_engine.py",
    "megatron/test_resume.py",
)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    root = Path(__file__).parent
    place = {root / name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path, len(LONGEST)))  # a stable sort
