import json
from pathlib import Path

import pytest

from benchmarks import run, table
from benchmarks.harness import ROWS, Timing

FOLDER = Path(run.__file__).parent
RUN = {"date": "2000-01-01", "device": "a GPU", "torch": "2"}


def line(row: str, shape: str = "s", *, ratio: float = 1.0, floor: float = 0.0, **run: str) -> dict:
    timing = Timing(row, shape, "b", 1.0, ratio, floor)
    return table.record(timing, {**RUN, **run})


def test_a_run_replaces_the_rows_that_it_timed_and_no_others():
    old = [line("a", "1"), line("a", "2"), line("b", "1"), line("c", "1")]
    new = [line("b", "3", date="2000-01-02"), line("b", "1", date="2000-01-02")]
    assert table.merge(old, new, ["a", "b", "c"]) == [*old[:2], *new, old[3]]
    assert table.merge([], new) == new


def test_a_line_says_which_run_it_is_of_and_whether_it_missed_its_floor():
    lines = [
        line("a", ratio=0.5, floor=0.9),
        line("b", ratio=0.9, floor=0.9, date="2000-01-02"),
        line("c", ratio=0.1),
    ]
    assert [table.missed(one) for one in lines] == [True, False, False]
    text = table.render(lines)
    rows = [row for row in text.splitlines() if row.startswith(("| a ", "| b ", "| c "))]
    assert ["**missed**" in row for row in rows] == [True, False, False]
    assert [row.split("|")[-3].strip() for row in rows] == ["a", "b", "a"]
    assert "* a: date 2000-01-01, torch 2" in text
    assert "* b: date 2000-01-02, torch 2" in text


def test_a_mean_shows_no_times():
    kept = table.record(Timing("a", "mean", "b", 1.0, 0.5, 0.9, mean=True), RUN)
    assert kept["ratio"] == 0.5
    assert "ours_us" not in kept


def test_update_writes_both_files(tmp_path, monkeypatch):
    monkeypatch.setattr(table, "this_run", lambda: RUN)
    table.update(tmp_path, [Timing("a", "1", "b", 2.0, 1.0, 0.9)])
    table.update(tmp_path, [Timing("c", "1", "b", 1.0, 1.0, 0.0)], ["c", "a"])
    lines = json.loads((tmp_path / "h200.json").read_text())
    assert [one["row"] for one in lines] == ["c", "a"]
    assert lines[1].items() >= {"shape": "1", "baseline": "b", "ratio": 0.5, "floor": 0.9}.items()
    assert (tmp_path / "h200.md").read_text() == table.render(lines)


def test_the_digest_follows_the_kernels(tmp_path, monkeypatch):
    monkeypatch.setattr(table, "KERNELS", tmp_path)
    seen = {table.kernels_digest()}
    for name, text in (("a.py", "1"), ("a.py", "2"), ("b.py", "2")):
        (tmp_path / name).write_text(text)
        seen.add(table.kernels_digest())
    assert len(seen) == 4


def test_the_committed_table_shows_the_committed_lines():
    lines = json.loads((FOLDER / "h200.json").read_text())
    assert (FOLDER / "h200.md").read_text() == table.render(lines)
    for one in lines:
        assert one.keys() >= {"row", "shape", "baseline", "ratio", "floor", "run"}


def test_every_row_names_a_test_that_exists():
    pytest.importorskip("triton")
    run.load_rows()
    assert {"linear", "paged decode", "engine", "training step"} <= ROWS.keys()
    for name, (_, test) in ROWS.items():
        assert (FOLDER.parent / test).is_file(), name


def test_a_row_that_fails_or_misses_is_told_and_hides_no_other(tmp_path, monkeypatch, capsys):
    def timed(ratio: float):
        return lambda: iter([Timing("x", f"{ratio}", "b", 1.0, ratio, 0.9)])

    def broken():
        raise RuntimeError("no such library")
        yield

    monkeypatch.setattr(table, "this_run", lambda: RUN)
    monkeypatch.setattr(run, "test_passes", lambda test: test != "red")
    rows = {
        "good": (timed(1.0), "green"),
        "slow": (timed(0.5), "green"),
        "broken": (broken, "green"),
        "red": (timed(1.0), "red"),
    }
    monkeypatch.setattr(run, "ROWS", rows)
    assert run.run(["good"], tmp_path) == 0
    assert run.run(list(rows), tmp_path) == 1
    said = capsys.readouterr().out
    assert "below its floor: x, 0.5, b: 0.50 of 0.90" in said
    assert "broken: not timed" in said
    assert "no such library" in said
    assert "red: not timed, its test fails: red" in said
    assert len(json.loads((tmp_path / "h200.json").read_text())) == 2
    for name in ("slow", "broken", "red"):
        assert run.run([name], tmp_path) == 1
