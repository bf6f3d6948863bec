"""What was recorded of chosen tokens, and its file: safetensors with a description in JSON."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from isomodels.errors import TraceError
from isomodels.trace.recorder import Column, Form, Operation

_FORMAT = 1


@dataclass(frozen=True)
class Entries:
    """The digests of one form's runs.

    Attributes:
        form: what the columns are.
        tokens: [n] int64, which token each row is of; a token that ran twice has two.
        digests: [n, columns] int64.
    """

    form: Form
    tokens: Tensor
    digests: Tensor


@dataclass(frozen=True)
class Recording:
    """Digests of every operation for chosen tokens, on one side.

    Attributes:
        about: what the side says of itself.
        sequences: names.
        sequence, position: [N] int64 of each token.
        ids: [N] int64, the token ids.
        history: [N, 2] int64, a hash of all ids up to the token: what two sides know it by.
        entries: of each form.
        weights: digest of each of the module's tensors.
    """

    about: Mapping[str, str]
    sequences: list[str]
    sequence: Tensor
    position: Tensor
    ids: Tensor
    history: Tensor
    entries: list[Entries]
    weights: Mapping[str, int] = field(default_factory=dict)

    def save(self, path: Path | str) -> None:
        """Write the file.

        Raises:
            TraceError: it cannot be written.
        """
        tensors = {name: getattr(self, name) for name in _TOKEN_TENSORS}
        for number, entry in enumerate(self.entries):
            tensors[f"tokens.{number}"] = entry.tokens
            tensors[f"digests.{number}"] = entry.digests
        described = {
            "format": _FORMAT,
            "about": dict(self.about),
            "sequences": self.sequences,
            "weights": dict(self.weights),
            "forms": [asdict(entry.form) for entry in self.entries],
        }
        try:
            # contiguous: safetensors refuses views
            save_file({k: t.contiguous() for k, t in tensors.items()}, path, _metadata(described))
        except (OSError, SafetensorError) as error:
            raise TraceError(f"the recording {path} cannot be written: {error}") from None

    @staticmethod
    def load(path: Path | str) -> "Recording":
        """Read a file.

        Raises:
            TraceError: there is none, or it is not a recording of this format.
        """
        try:
            with safe_open(path, "pt") as file:
                described = json.loads((file.metadata() or {})["isomodels_trace"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if described["format"] != _FORMAT:
                raise TraceError(
                    f"{path} is a recording of format {described['format']}, this isomodels reads "
                    f"{_FORMAT}: record again"
                )
            recording = Recording(
                about=described["about"],
                sequences=described["sequences"],
                entries=[
                    Entries(_form(one), tensors[f"tokens.{i}"], tensors[f"digests.{i}"])
                    for i, one in enumerate(described["forms"])
                ],
                weights=described["weights"],
                **{name: tensors[name] for name in _TOKEN_TENSORS},
            )
            recording.check(path)
            return recording
        except TraceError:
            raise
        except (OSError, SafetensorError) as error:
            raise TraceError(f"the recording {path} cannot be read: {error}") from None
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise TraceError(
                f"{path} is no recording of isomodels ({type(error).__name__}: {error})"
            ) from None

    def check(self, path: Path | str) -> None:
        """Refuse tensors that do not fit one another.

        Raises:
            TraceError: naming the first.
        """
        count = len(self.position)
        sizes: dict[str, tuple[Tensor, tuple[int, ...]]] = {
            "sequence": (self.sequence, (count,)),
            "ids": (self.ids, (count,)),
            "history": (self.history, (count, 2)),
        }
        for number, entry in enumerate(self.entries):
            shape = (len(entry.tokens), len(entry.form.columns))
            sizes[f"digests.{number}"] = (entry.digests, shape)
            if len(entry.tokens) and not 0 <= int(entry.tokens.min()) <= int(
                entry.tokens.max()
            ) < max(count, 1):
                raise TraceError(f"{path}: tokens.{number} names a token that there is not")
        for name, (tensor, wanted) in sizes.items():
            if tuple(tensor.shape) != wanted or tensor.dtype != torch.int64:
                raise TraceError(
                    f"{path}: {name} is {tensor.dtype} {list(tensor.shape)}, "
                    f"not int64 {list(wanted)}: the file was changed or cut"
                )
        for entry in self.entries:
            for operation in entry.form.operations:
                for column in (*operation.inputs.values(), *operation.outputs.values()):
                    if isinstance(column, int) and not 0 <= column < len(entry.form.columns):
                        raise TraceError(f"{path}: {operation.operator} has no column {column}")


_TOKEN_TENSORS = ("sequence", "position", "ids", "history")


def _metadata(described: Any) -> dict[str, str]:
    return {"isomodels_trace": json.dumps(described, separators=(",", ":"))}


def _form(raw: Mapping[str, Any]) -> Form:
    return Form(
        raw["section"],
        [
            Operation(
                one["module"],
                one["operator"],
                dict(one["inputs"]),
                {int(index): column for index, column in one["outputs"].items()},
            )
            for one in raw["operations"]
        ],
        [Column(tuple(one["shape"]), one["dtype"]) for one in raw["columns"]],
    )
