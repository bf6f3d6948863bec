"""Recording in a trainer, or around any run of a module."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isomodels.batch import Batch
from isomodels.trace.choice import Choice
from isomodels.trace.collect import Collector, Span
from isomodels.trace.recorder import Recorder


@contextmanager
def record(
    core: Any,
    path: Path | str,
    *,
    choice: Choice = Choice(),
    names: Sequence[str] | None = None,
    logprobs: bool = True,
    about: Mapping[str, str] | None = None,
) -> Iterator[None]:
    """Record every operation of every forward of whole sequences while the context is open.

    ```
    with record(trainer.core, "trainer.trace", choice=Choice.parse(None, "100:120")):
        trainer.score(sequences)
    ```

    What activation recompute runs again in the backward pass is not recorded.

    Args:
        core: an architecture's module, whole, not compiled.
        path: of the file, written at the end.
        choice: which tokens.
        names: of the sequences in their order over all forwards; by default "0", "1", ...
        logprobs: also compute the chosen tokens' logprobs over the whole vocabulary, as an engine
            does: a trainer computes those of its targets alone, which cannot be compared.
        about: what the recording says of its side.

    Raises:
        TraceError: nothing was chosen, the module is a part of a model, the weights changed, or
            the file cannot be written.
    """
    count = 0

    def name_of(number: int) -> str:
        return names[number] if names is not None and number < len(names) else str(number)

    def after_forward(ids: Tensor, positions: Tensor, batch: Batch, hidden: Tensor) -> None:
        nonlocal count
        collector.begin()
        bounds = batch.cu_seqlens_q.tolist()
        spans = [
            Span(name_of(count + i), 0, start, end - start)
            for i, (start, end) in enumerate(pairwise(bounds))
        ]
        count += len(spans)
        collector.add(spans, ids)
        rows = [
            span.row + i
            for span in spans
            if choice.has_sequence(span.name)
            for i in range(span.count)
            if choice.has_position(i)
        ]
        if logprobs and rows:
            with torch.no_grad():
                core.logprobs(hidden[torch.tensor(rows, device=hidden.device)])

    recorder = Recorder(core, after_forward=after_forward)
    try:
        collector = Collector(recorder, choice)
        recorder.arm()
        yield
        recorder.armed = False
        collector.finish(about or {}).save(path)
    finally:
        recorder.close()
