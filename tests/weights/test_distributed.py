"""Reading and writing `dist_checkpointing` folders: chunks, their covers, and what is refused."""

import json
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isomodels.errors import CheckpointError
from isomodels.weights_conv import dist_write
from isomodels.weights_conv.bits import HeldTensors
from isomodels.weights_conv.dist_metadata import (
    _covers,
    find_distributed,
    read_common,
    read_metadata,
)
from isomodels.weights_conv.dist_names import COMMON
from isomodels.weights_conv.dist_read import DistributedFiles
from isomodels.weights_conv.dist_write import write_distributed
from tests.weights.dcp import grid, write_dcp
from tests.weights.support import any_bits, raw

SHAPES = st.lists(st.integers(1, 6), min_size=1, max_size=3)


@settings(max_examples=80, deadline=None)
@given(SHAPES, st.data())
def test_a_grid_covers_and_nothing_less(shape: list[int], data: st.DataObject) -> None:
    cuts = [data.draw(st.integers(1, size)) for size in shape]
    boxes = [(at, tuple(part.shape)) for at, part in grid(torch.zeros(shape), cuts)]
    assert _covers(tuple(shape), boxes)
    at = data.draw(st.integers(0, len(boxes) - 1))
    offsets, sizes = boxes[at]
    dim = data.draw(st.integers(0, len(shape) - 1))
    moved = (*offsets[:dim], offsets[dim] + 1, *offsets[dim + 1 :])
    longer = (*sizes[:dim], sizes[dim] + 1, *sizes[dim + 1 :])
    for wrong in ([], [boxes[at]] * 2, [(moved, sizes)], [(offsets, longer)]):
        assert not _covers(tuple(shape), [*boxes[:at], *wrong, *boxes[at + 1 :]])


@pytest.mark.parametrize("chunk", [1, 64, 10_000])
def test_what_is_written_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(dist_write, "_CHUNK_SIZE", chunk)
    shapes = [(5, 3), (7,), (2, 3, 4), (), (3, 0)]
    tensors = {f"t{i}": any_bits(*shape, seed=i) for i, shape in enumerate(shapes[:3])}
    tensors |= {"scalar": torch.tensor(3.0), "empty": torch.zeros(3, 0)}
    write_distributed(tmp_path, HeldTensors(tensors), max_shard_size=1000)
    assert find_distributed(tmp_path) == tmp_path
    files = DistributedFiles(tmp_path)
    assert files.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert raw(files.read(name)) == raw(tensor)
    assert raw(files.read("t2", (1, 2))) == raw(tensors["t2"][1, 2])
    with torch.device("meta"):  # a default device does not matter
        for name, tensor in tensors.items():
            assert raw(files.read(name)) == raw(tensor)


def stored(tmp_path: Path) -> Path:
    return write_dcp(
        tmp_path / "x", {"a": grid(any_bits(4, 6), (2, 3)), "b": grid(any_bits(3), ())}
    )


def change(folder: Path, edit) -> None:
    file = folder / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    edit(metadata)
    file.write_bytes(pickle.dumps(metadata))


def first_place(metadata):
    return next(iter(metadata.storage_data.values()))


FAULTS = {
    "a gap": (
        lambda m: m.state_dict_metadata["a"].chunks.pop(),
        "the chunks of a overlap or leave gaps",
    ),
    "twice": (
        lambda m: m.state_dict_metadata["a"].chunks.append(m.state_dict_metadata["a"].chunks[0]),
        "the chunks of a overlap or leave gaps",
    ),
    "no place": (
        lambda m: m.storage_data.pop(next(iter(m.storage_data))),
        "nothing tells where its chunk",
    ),
    "another file": (
        lambda m: setattr(first_place(m), "relative_path", "../x/__0_0.distcp"),
        "lies in '../x/__0_0.distcp', which is absent",
    ),
    "beyond the file": (
        lambda m: setattr(first_place(m), "offset", 10**6),
        "was cut short, and a is lost",
    ),
    "too few bytes": (lambda m: setattr(first_place(m), "length", 3), r"has a chunk \[2, 2\] in 3"),
    "compressed": (
        lambda m: setattr(first_place(m), "transform_descriptors", ["zstd"]),
        "compressed or encrypted",
    ),
    "no strides": (
        lambda m: setattr(m.state_dict_metadata["a"], "size", (0, 2**61, 2**61)),
        "is no shape",
    ),
    "a name of two lines": (
        lambda m: m.state_dict_metadata.update({"x\n\x1b[2J": m.state_dict_metadata["a"]}),
        r"x\\n\\x1b\[2J: nothing tells where",
    ),
    "no dtype": (
        lambda m: setattr(m.state_dict_metadata["b"].properties, "dtype", "float32"),
        "the dtype of b is 'float32'",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_description_that_cannot_be(tmp_path: Path, fault: str) -> None:
    folder = stored(tmp_path)
    edit, message = FAULTS[fault]
    change(folder, edit)
    with pytest.raises(CheckpointError, match=message):
        read_metadata(folder)


def test_a_chunk_that_is_another(tmp_path: Path) -> None:
    """Places exchanged between two tensors of unlike shapes: the chunk itself tells."""
    folder = stored(tmp_path)

    def exchange(metadata) -> None:
        places = metadata.storage_data
        a, b = (next(k for k in places if k.fqn == name) for name in "ab")
        places[a], places[b] = places[b], places[a]

    change(folder, exchange)
    with pytest.raises(CheckpointError, match=r"holds \[3\] in float32 for a chunk of a, which is"):
        DistributedFiles(folder).read("a")


def test_every_bit_of_the_data_is_checked(tmp_path: Path) -> None:
    """torch's reader passes over the archive's checksums; this one does not."""
    tensor = any_bits(16, 16)
    folder = write_dcp(tmp_path / "x", {"a": grid(tensor, ())}, files=1)
    file = folder / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[bytes(content).index(raw(tensor)[1]) + 77] ^= 4
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp is damaged at a \(Bad CRC-32"):
        DistributedFiles(folder).read("a")


def test_other_formats_are_named(tmp_path: Path) -> None:
    folder = stored(tmp_path)
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))
    with pytest.raises(CheckpointError, match=r"the format is 'zarr', and only torch_dist is read"):
        read_metadata(folder)
    (folder / "metadata.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no metadata\.json: a save was cut off"):
        read_metadata(folder)


def test_a_compressed_archive_is_refused(tmp_path: Path) -> None:
    """It could fill the memory from a file of a few bytes; torch.save compresses nothing."""
    folder = stored(tmp_path)
    torch.save({"iteration": 7}, folder / COMMON)
    assert read_common(folder) == {"iteration": 7}
    with zipfile.ZipFile(folder / COMMON, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("common/data.pkl", pickle.dumps([0] * 10**6))
    with pytest.raises(CheckpointError, match=r"common\.pt: .*is compressed"):
        read_common(folder)
    file = folder / "z.distcp"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/0", bytes(10**6))

    def move(metadata) -> None:
        for place in metadata.storage_data.values():
            place.relative_path, place.offset, place.length = file.name, 0, file.stat().st_size

    change(folder, move)
    with pytest.raises(CheckpointError, match=r"z\.distcp is damaged at a .*is compressed"):
        DistributedFiles(folder).read("a")
