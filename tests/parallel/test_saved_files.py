"""Every rank is told the same of a saved training that it cannot load, or cannot save."""

import re
import time

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

REMEDY = "copy the folder again, or resume from another save"
FULL = "File too large|a file could not be written to its end: make room on the disk"


def test_all_ranks_are_told_of_the_files_of_any(trainers, tiny, tmp_path):
    path, out = tiny("Qwen3ForCausalLM", "bfloat16"), tmp_path / "saved"
    ranks = trainers(2)
    ranks.submit("told", str(path), "pp2", str(out))
    first, second = ranks.results()
    assert first == second
    what = f"cannot load {out}: __1_0.distcp is"
    assert first["changed"] == f"{what} not as it was saved (cut or damaged): {REMEDY}"
    assert first["missing"] == f"{what} missing: {REMEDY}"
    for rank in (0, 1):
        assert re.search(f"^cannot write {out}: .*({FULL})", first[f"full for {rank}"])
    assert first["whole"] is None


def test_where_the_first_rank_alone_cannot_write_no_other_waits(trainers, tiny, tmp_path):
    path, out = tiny("Qwen3ForCausalLM", "bfloat16"), tmp_path / "saved"
    ranks = trainers(2)
    ranks.submit("told_of_the_first", str(path), "pp2", str(out))
    begun = time.monotonic()
    first, second = ranks.results()
    assert re.match(f"CheckpointError: cannot write {out}: .*({FULL})", first)
    assert second.startswith("LostRankError: rank 1 of 2, in a save: another rank ended")
    assert time.monotonic() - begun < 30
    assert not out.exists()
