"""Takes the digest of every operation's rows while a model runs.

Every operation is a torch operator, so one dispatch mode around the module sees them all. What a
forward ran is a list of operations whose tensors are columns of one matrix [tokens, columns].
"""

import sys
from bisect import bisect_right, insort
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from isomodels.batch import Batch
from isomodels.errors import TraceError
from isomodels.layers.parallel import named_tensors
from isomodels.trace.digest import TOGETHER, add_digests, row_digests, tensor_digest
from isomodels.weights_conv.bits import dtype_name

_NAMESPACE = "isomodels"
_BLOCK = 64  # columns that are made and cleared together
_BATCH = "batch"  # an input that says where tokens lie: it differs from host to host
_CONSTANT = "constant"

# Between sort and sum a mixture's rows are no tokens: the operators whose rows lie by place.
_SORT, _BY_PLACE = "moe_sort", ("grouped_linear", "swiglu")


@dataclass(frozen=True)
class Column:
    """A tensor of which every token has a row: the row's shape and dtype."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Operation:
    """One call of an operator.

    Attributes:
        module: name of the module that called it.
        operator: its name, without the namespace.
        inputs: by argument, the column of a tensor; "weight NAME"; "batch" for what says where
            tokens lie; "constant".
        outputs: by index, the column of each that has a row for every token.
    """

    module: str
    operator: str
    inputs: dict[str, int | str]
    outputs: dict[int, int]


@dataclass
class Form:
    """What one kind of run is made of: an engine's pages and a trainer's packs are two.

    Attributes:
        section: "decoder", or the "head" on top of it.
        operations: in the order of their calls.
        columns: of the matrix of digests.
    """

    section: str
    operations: list[Operation] = field(default_factory=list)
    columns: list[Column] = field(default_factory=list)


@dataclass
class Section:
    """The runs of one part of a model, and the digests of the last.

    Attributes:
        forms: of its runs, as they came.
        current: form of the last run.
        rows: tokens of the last run.
    """

    name: str
    forms: list[Form] = field(default_factory=list)
    current: int = 0
    rows: int = 0
    _blocks: list[Tensor] = field(default_factory=list)

    def begin(self, rows: int, most: int, device: torch.device) -> None:
        """Clear the matrix for a run of so many tokens; `most` sizes it the first time."""
        self.rows = rows
        if self._blocks and self._blocks[0].shape[1] < rows:
            self._blocks = []
        self._width = -(-max(rows, most) // 2) * 2  # every column begins at 16 bytes
        self._device = device
        for block in self._blocks:
            block[:, :rows].zero_()

    def slot(self, index: int) -> Tensor:
        """Where the digests of column `index` go: [rows] int64 zeros."""
        while index >= len(self._blocks) * _BLOCK:
            shape = (_BLOCK, self._width)
            self._blocks.append(torch.zeros(shape, dtype=torch.int64, device=self._device))
        return self._blocks[index // _BLOCK][index % _BLOCK][: self.rows]

    def take(self, rows: Tensor | slice) -> Tensor:
        """The digests of some tokens of the last run: n rows -> [n, columns]."""
        found = [block[:, rows] for block in self._blocks]
        return torch.cat(found)[: len(self.forms[self.current].columns)].t().contiguous()

    def ran(self, form: Form) -> None:
        """Say what the last run was made of."""
        if form not in self.forms:
            self.forms.append(form)
        self.current = self.forms.index(form)


@dataclass(frozen=True)
class _Weights:
    """The weights of one storage: (first byte, end, name), ascending."""

    storage: StorageWeakRef
    places: list[tuple[int, int, str]] = field(default_factory=list)


class _Run(TorchDispatchMode):
    """Digests what the operators of one run give. Nothing else is looked at."""

    def __init__(self, recorder: "Recorder", section: Section, batch: Batch | None):
        super().__init__()
        self.recorder, self.section = recorder, section
        self.form = Form(section.name)
        # storage -> its column, or what it is; the reference keeps another from its place
        self.sources: dict[int, tuple[int | str, StorageWeakRef]] = {}
        self.places: tuple[str, Tensor] | None = None
        self.pending: list[tuple[Tensor, Tensor]] = []  # held, so that nothing takes their memory
        for tensor in _tensors_of(batch):
            self._name(tensor, _BATCH)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator; if it is ours, note it."""
        if self.pending and func._schema.is_mutable:
            with self.recorder.watched():
                self.flush()
        out = func(*args, **(kwargs or {}))
        if func.namespace == _NAMESPACE and not self.recorder.failed:
            with self.recorder.watched():
                self.note(func, args, kwargs or {}, out)
        return out

    def flush(self) -> None:
        """Digest the tensors that wait for it."""
        add_digests(self.pending)
        self.pending.clear()

    def note(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Digest what an operator gave, and those of its inputs that no operator gave."""
        named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        inputs = {
            name: self._source(name, value)
            for name, value in named.items()
            if isinstance(value, Tensor)
        }
        module, operator = self.recorder.module, func._opname
        results = list(out) if isinstance(out, list | tuple) else [out]
        outputs: dict[int, int] = {}
        if operator == _SORT:
            self.places = module, results[2]
            for tensor in results:
                self._name(tensor, _BATCH)
        else:
            whole = all(isinstance(s, str) and s.startswith("weight") for s in inputs.values())
            for index, tensor in enumerate(results):
                if isinstance(tensor, Tensor):
                    outputs[index] = self._digest(tensor, whole, operator)
        self.form.operations.append(Operation(module, operator, inputs, outputs))

    def _source(self, name: str, tensor: Tensor) -> int | str:
        found = self.sources.get(tensor.untyped_storage()._cdata)
        if found is not None:
            return found[0]
        weight = self.recorder.weight_at(tensor)
        if weight is not None:
            return f"weight {weight}"
        if name == "table" or not tensor.dim() or len(tensor) != self.section.rows:
            return _CONSTANT
        return self._digest(tensor, False, "")

    def _digest(self, tensor: Tensor, whole: bool, operator: str) -> int:
        index, rows = len(self.form.columns), self.section.rows
        by_place = (
            operator in _BY_PLACE
            and self.places is not None
            and self.places[0] == self.recorder.module
        )
        shape = tuple(tensor.shape[1:])
        slot = self.section.slot(index)
        if whole:
            shape = tuple(tensor.shape)
            slot += tensor_digest(tensor)
        elif by_place and self.places is not None:
            each = row_digests(tensor)[self.places[1].long()]  # [T, k]
            shape = (each.shape[1], *shape)
            row_digests(each, slot)
        elif len(tensor) == rows:
            self.pending.append((tensor, slot))
            if len(self.pending) == TOGETHER:
                self.flush()
        else:
            raise TraceError(
                f"{self.recorder.module}: {operator} gave {list(tensor.shape)} for {rows} tokens, "
                "so its rows are no tokens and cannot be traced"
            )
        self.form.columns.append(Column(shape, dtype_name(tensor.dtype)))
        self._name(tensor, index)
        return index

    def _name(self, tensor: Tensor, source: int | str) -> None:
        reference = StorageWeakRef(tensor.untyped_storage())
        self.sources[reference.cdata] = source, reference


class Recorder:
    """Hangs on a module and takes the digests of its runs while `armed`.

    Args:
        core: an architecture's module, whole: a rank's parts have other rows.
        most: rows of the largest run, so that a CUDA graph's digests stay in one place; 0: any.
        captures: put the digests into CUDA graphs, armed or not, which replays then fill.
        after_forward: called with the ids [T], positions [T], batch and hidden [T, H] of each
            forward that was recorded.

    Attributes:
        armed: whether the runs of the module are recorded now; see `arm`.
        forward, head: what was recorded: the decoder, and the head on top of it.
        module: name of the module that is running.
        tolerant: keep a fault of the recording in `failed` and let the run go on, as an engine
            needs it; else it is raised.

    Raises:
        TraceError: for a part of a model.
    """

    def __init__(
        self,
        core: Any,
        most: int = 0,
        *,
        captures: bool = False,
        after_forward: Callable[[Tensor, Tensor, Batch, Tensor], None] | None = None,
    ):
        if not core.layout.whole or core.layout.tensor.sequence:
            raise TraceError(
                "a rank of a parallel layout holds parts of most tensors, which no trace "
                "compares: trace on one rank"
            )
        self.core, self.most, self.after_forward = core, most, after_forward
        self.captures, self._warming = captures, captures
        self.armed, self.tolerant = False, False
        self.failed: Exception | None = None
        self.weights: dict[int, _Weights] = {}
        self.forward, self.head = Section("decoder"), Section("head")
        self.after_head: Callable[[], None] | None = None
        self._names: list[str] = []
        self._run: _Run | None = None
        self._handles: list[Any] = []
        for name, module in core.named_modules():
            if name:
                enter = module.register_forward_pre_hook(self._enter(name))
                leave = module.register_forward_hook(self._leave, always_call=True)
                self._handles += [enter, leave]
        self._hang(core, self._begin_forward, self._end_forward)
        self._hang(core.lm_head, self._begin_head, self._end_head)
        self.read_weights()

    @property
    def module(self) -> str:
        """See the class."""
        return self._names[-1] if self._names else ""

    def arm(self) -> None:
        """Record from now on, with the weights that the module has now."""
        self.read_weights()
        self.armed, self.failed = True, None

    def read_weights(self) -> None:
        """Note where each weight lies: a trainer's share one storage."""
        self.weights.clear()
        for name, tensor in named_tensors(self.core).items():
            reference = StorageWeakRef(tensor.untyped_storage())
            held = self.weights.setdefault(reference.cdata, _Weights(reference))
            begin = int(tensor.storage_offset()) * tensor.element_size()
            insort(held.places, (begin, begin + tensor.nbytes, name))

    def weight_at(self, tensor: Tensor) -> str | None:
        """Name of the weight that a tensor is, or is a part of."""
        held = self.weights.get(tensor.untyped_storage()._cdata)
        if held is None:
            return None
        at = int(tensor.storage_offset()) * tensor.element_size()
        number = bisect_right(held.places, (at, sys.maxsize, "")) - 1
        _, end, name = held.places[number] if number >= 0 else (0, 0, "")
        return name if at < end else None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Where a fault of the recording must not be the run's."""
        try:
            yield
        except Exception as error:
            if not self.tolerant:
                raise
            self.failed, self.armed = error, False

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _hang(self, module: nn.Module, begin: Any, end: Any) -> None:
        self._handles += [
            module.register_forward_pre_hook(begin, with_kwargs=True),
            module.register_forward_hook(end, with_kwargs=True, always_call=True),
        ]

    def _enter(self, name: str) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            if self._run is not None:
                self._names.append(name)

        return enter

    def _leave(self, *_: Any) -> None:
        if self._names:
            self._names.pop()

    def _begin_forward(self, _: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        ids, _, batch = args
        if self._wanted(ids):
            self._start(self.forward, ids, batch)

    def _end_forward(self, _: Any, args: tuple, kwargs: Any, hidden: Any) -> None:
        if self._stop(hidden) and self.after_forward is not None:
            ids, positions, batch = args
            with self.watched():
                self.after_forward(ids, positions, batch, hidden)

    def _begin_head(self, _: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        if self.armed and self.after_head is not None and self._run is None:
            self._names.append("lm_head")
            self._start(self.head, args[0], None)

    def _end_head(self, *arguments: Any) -> None:
        if self._run is not None and self._run.section is self.head:
            self._names.clear()
            if self._stop(arguments[-1]) and self.after_head is not None:
                with self.watched():
                    self.after_head()

    def _wanted(self, ids: Tensor) -> bool:
        """Whether a forward is recorded: also while a CUDA graph is captured, and warmed up."""
        if self.captures and ids.is_cuda and torch.cuda.is_current_stream_capturing():
            self._warming = False
            return True
        return self.armed or (self.captures and self._warming)

    def _start(self, section: Section, first: Tensor, batch: Batch | None) -> None:
        section.begin(len(first), self.most if section is self.forward else 0, first.device)
        self._run = _Run(self, section, batch)
        self._run.__enter__()

    def _stop(self, result: Any) -> bool:
        """End a run; whether it was recorded to its end."""
        run, self._run = self._run, None
        self._names.clear()
        if run is None:
            return False
        run.__exit__(None, None, None)
        if not self.failed:
            with self.watched():
                run.flush()
        if self.failed or not isinstance(result, Tensor):  # the run itself failed
            return False
        run.section.ran(run.form)
        return True


def _tensors_of(batch: Batch | None) -> list[Tensor]:
    if batch is None:
        return []
    found = [batch.cu_seqlens_q, batch.seq_lens]
    if batch.paged is not None:
        found += [*batch.paged.caches, batch.paged.block_table, batch.paged.slot_mapping]
    if batch.states is not None:
        found += [t for state in batch.states.tensors for t in state] + list(batch.states.slots)
    return found
