"""Which operations a module has run, beside those that its contract states.

Three things that need not be the same: what a contract requests; what is installed behind an
operator's name on a device; and what served, counted as the module ran.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from isomodels.contract.document import Contract
from isomodels.contract.operations import OperationCount
from isomodels.validate.battery import operators

# Key of vLLM's `additional_config` that makes an engine count.
COUNT_OPERATIONS = "isomodels_count_operations"

_KEYS = {"torch": "CPU", "triton": "CUDA"}  # torch's dispatch keys
# Beside those of the contract's forms: the engine normalises processed logits in its sampler, and a
# training step's head keeps part of its work, with the bits of `token_logprobs`.
_HEADS: dict[str, list[dict[str, int]]] = {
    "paged": [{"lm_head": 1}],
    "packed": [{"token_logprobs_kept": 1}],
}
_CUSTOM_OP = "torch/_library/custom_ops.py"  # which registers the kernels of `custom_op`


class ServedOperations:
    """Counts the operators of every run of a module, from now on.

    A CUDA graph is counted as it is captured: what is replayed is what was counted.

    Args:
        core: an architecture's module.
    """

    def __init__(self, core: Any):
        self._ran: dict[tuple[str, str, tuple[tuple[str, int], ...]], int] = {}
        self._open: list[OperationCount] = []
        self._form = "packed"
        self._handles: list[Any] = []
        for module, begin, end in (
            (core, self._begin_forward, self._end_forward),
            (core.lm_head, self._begin_head, self._end_head),
        ):
            self._hang(module, begin, end)

    def _hang(self, module: nn.Module, begin: Any, end: Any) -> None:
        self._handles += [
            module.register_forward_pre_hook(begin),
            module.register_forward_hook(end, always_call=True),
        ]

    def _begin_forward(self, _: Any, args: tuple) -> None:
        *_, batch = args
        self._form = "packed" if batch.paged is None else "paged"
        self._begin()

    def _begin_head(self, *_: Any) -> None:
        self._begin()

    def _end_forward(self, *_: Any) -> None:
        self._end("forward")

    def _end_head(self, *_: Any) -> None:
        self._end("head")

    def _begin(self) -> None:
        self._open.append(OperationCount())
        self._open[-1].__enter__()

    def _end(self, part: str) -> None:
        count = self._open.pop()
        count.__exit__(None, None, None)
        key = self._form, part, tuple(sorted(count.counts.items()))
        self._ran[key] = self._ran.get(key, 0) + 1

    def ran(self) -> list[dict[str, Any]]:
        """Of each kind of run: {"form", "part", "operators": {name: calls}, "runs": how many}."""
        return [
            {"form": form, "part": part, "operators": dict(counts), "runs": runs}
            for (form, part, counts), runs in self._ran.items()
        ]

    def close(self) -> None:
        """Stop counting."""
        for handle in self._handles:
            handle.remove()


def installed(contract: Contract) -> dict[str, str]:
    """Who registered each operator that a contract requests, on its device: "isomodels" or a file.

    What torch's dispatcher holds, not what our files say: another package may have put a kernel of
    its own under the same name, and a count of names would not see it.
    """
    operators()  # registers those of all kernel files
    key = _KEYS[contract.numerical_policy["device"]["backend"]]
    return {name: _registrar(name, key) for name in contract.numerical_policy["schedules"]}


def _registrar(name: str, key: str) -> str:
    dump: str = torch._C._dispatch_dump(f"isomodels::{name}")
    line = next((x for x in dump.splitlines() if x.startswith(f"{key}: ")), "")
    where = line.partition("registered at ")[2].partition(" :: ")[0]
    return "isomodels" if _CUSTOM_OP in where else where or "nobody"


def served_faults(contract: Contract, ran: Iterable[Mapping[str, Any]], side: str) -> list[str]:
    """How what served differs from what the contract requests; empty if it does not.

    Args:
        contract: of the model.
        ran: as `ServedOperations.ran` gives it.
        side: "engine" or "trainer", for the messages. Each must have run its own form.
    """
    forms = contract.numerical_policy["forms"]
    own = "paged" if side == "engine" else "packed"
    heads = [counts for part, counts in forms[own].items() if part != "forward"] + _HEADS[own]
    faults = []
    for one in ran:
        allowed = heads if one["part"] == "head" else [forms[one["form"]]["forward"]]
        if one["operators"] not in allowed:
            faults.append(
                f"the {side}'s {one['part']} served other operations than its contract requests: "
                + _difference(one["operators"], allowed[0])
            )
    for part in ("forward", "head"):
        form = {"forward": own}.get(part)
        if not any(one["part"] == part and form in (None, one["form"]) for one in ran):
            faults.append(f"the {side} counted no {part} of its own")
    return faults


def _difference(ran: Mapping[str, int], requested: Mapping[str, int]) -> str:
    return ", ".join(
        f"{ran.get(name, 0)} {name} instead of {requested.get(name, 0)}"
        for name in sorted({*ran, *requested})
        if ran.get(name, 0) != requested.get(name, 0)
    )
