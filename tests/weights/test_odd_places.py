"""Folders in which something odd lies: links, pipes, names of no text, folders of small files."""

import os
import stat
from pathlib import Path

import pytest

from isomodels.errors import CheckpointError
from isomodels.weights_conv.files import read_tensors
from isomodels.weights_conv.write import write_checkpoint
from tests.weights.support import raw_folder
from tests.weights.test_writing import NEW, OLD, checkpoint, expected


@pytest.mark.parametrize("kind", ["link", "file"])
def test_something_else_under_the_hidden_name(tmp_path: Path, kind: str) -> None:
    """A link there must not have the folder behind it emptied."""
    hidden, other = tmp_path / ".out.isomodels-partial", tmp_path / "other"
    other.mkdir()
    (other / "precious").write_text("kept")
    if kind == "link":
        hidden.symlink_to(other)
    else:
        hidden.write_text("kept")
    with pytest.raises(CheckpointError, match=f"^{hidden}, where .* is a file or a link: remove"):
        write_checkpoint(tmp_path / "out", OLD)
    assert (hidden / "precious" if kind == "link" else hidden).read_text() == "kept"
    assert not (tmp_path / "out").exists()


def test_a_name_that_is_no_utf8(tmp_path: Path) -> None:
    """safetensors would call the file damaged."""
    source, odd = checkpoint(tmp_path / "source"), Path(f"{tmp_path}/\udcff")
    with pytest.raises(CheckpointError, match=r"udcff' is no UTF-8 text: rename it$"):
        write_checkpoint(odd, OLD)
    assert [entry.name for entry in tmp_path.iterdir()] == ["source"]
    source.rename(odd)
    with pytest.raises(CheckpointError, match=r"is no UTF-8 text: rename it$"):
        read_tensors(odd)


@pytest.mark.timeout(30)
def test_a_pipe_in_a_folder_that_is_replaced(tmp_path: Path) -> None:
    """Opening it would wait for a writer, for ever."""
    out = checkpoint(tmp_path / "out")
    os.mkfifo(out / "pipe")
    write_checkpoint(out, NEW, like=out)
    assert raw_folder(out) == expected(NEW)
    assert stat.S_ISFIFO((out / "pipe").stat().st_mode)


def test_named_chat_templates_are_copied(tmp_path: Path) -> None:
    """As transformers saves a tokenizer that has several."""
    source = checkpoint(tmp_path / "source")
    templates = source / "additional_chat_templates"
    templates.mkdir()
    (templates / "tool_use.jinja").write_text("{{ tools }}")
    (templates / "model.safetensors").write_text("no template")
    (source / "onnx").mkdir()
    write_checkpoint(tmp_path / "out", NEW, like=source)
    copied = tmp_path / "out" / templates.name
    assert [(f.name, f.read_text()) for f in copied.iterdir()] == [
        ("tool_use.jinja", "{{ tools }}")
    ]
    assert [f.name for f in (tmp_path / "out").iterdir() if f.is_dir()] == [templates.name]
