"""The rows of several GPUs, over gloo at tiny sizes: they run, and count what crosses the wire."""

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from benchmarks import parallel
from isomodels.parity.ranks import Ranks


@pytest.fixture
def ranks(pytestconfig, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(pytestconfig.rootpath), prepend=":")
    with Ranks("bench", "benchmarks.parallel:Rank", 2) as started:
        started.results()
        yield started


def test_a_row_that_is_not_there(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["parallel", "--rows", "linear,exchanges", "--gpus", "2"])
    with pytest.raises(SystemExit, match="2"):
        parallel.main()
    assert "no row 'exchanges', only linear, exchange, engine" in capsys.readouterr().err


@pytest.mark.slow
def test_rows_run_and_count_bytes(ranks, monkeypatch):
    monkeypatch.setattr(parallel, "TOKENS", (1, 2048))
    monkeypatch.setattr(parallel, "SHAPES", ((256, 128),))
    monkeypatch.setattr(parallel, "MESSAGES", (2**14, 2**20))
    small, large = parallel.linear_rows(ranks, 2)
    assert "received by a rank: 1,024 bytes, 512 in a ring of bfloat16 (2.00)" in small.note
    assert "a rank: 1,572,864 bytes, 1,048,576 in a ring of bfloat16 (1.50)" in large.note
    exchanged = list(parallel.exchange_rows(ranks, 2))
    assert [one.shape.split()[0] for one in exchanged] == ["16", "1,024"]
    assert all(one.ours_ms > 0 < one.baseline_ms for one in (small, large, *exchanged))
