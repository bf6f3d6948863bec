"""The registry of who checks which operation, and what every operation must have checked.

One file in `isomodels/validate/operations` declares the checks of one operation. Each must have all
checks of `REQUIRED`, and each operator registered under `isomodels::` an operation that covers it:
`missing_checks` names what is not.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef

from isomodels.kernels.schedule import SCHEDULES
from isomodels.validate.accuracy import Same, assert_close
from isomodels.validate.bits import Fault, assert_same_bits
from isomodels.validate.inputs import hard
from isomodels.validate.rows import ROWS

Depth = Literal["quick", "full"]
GRADIENTS = "gradients"
REQUIRED = ("invariance", "degenerate", "hazards", "accuracy", GRADIENTS)
GRAPH = "graph"  # only on a GPU
QUICK = ("fused", "parts")  # what engine and trainer compute by different operators

# The interpreter's products follow numpy, whose order of sums follows shapes: it shows errors of
# indices and masks, not bits.
_INTERPRETED_BOUND = 1e-5


def _same_values(actual: Tensor, expected: Tensor, what: str = "result") -> None:
    if actual.shape != expected.shape:
        raise Fault(f"{what}: {list(actual.shape)} against {list(expected.shape)}")
    differ = actual.isnan() != expected.isnan()
    if differ.any():
        raise Fault(f"{what}: NaN in one alone, first at {differ.nonzero()[0].tolist()}")
    if actual.numel() and expected.nan_to_num().any():
        assert_close(actual.nan_to_num(), expected.nan_to_num(), _INTERPRETED_BOUND, what)


@dataclass(frozen=True)
class Place:
    """Where the checks run, and how deep.

    Attributes:
        device: of the tensors.
        depth: "quick" before a host starts, "full" for the command.
        interpreted: the Triton kernels run in Triton's interpreter on the CPU.
        trains: whether gradients are checked: an engine takes none.
    """

    device: torch.device
    depth: Depth = "full"
    interpreted: bool = False
    trains: bool = True

    @property
    def on_gpu(self) -> bool:
        """Whether bits of the Triton backend are compared."""
        return self.device.type == "cuda"

    @property
    def backend(self) -> str:
        """As in `kernels/schedule.py`."""
        return "triton" if self.on_gpu or self.interpreted else "torch"

    @property
    def brief(self) -> bool:
        """Whether few circumstances have to do."""
        return self.depth == "quick" or self.interpreted

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The interpreter multiplies no bf16."""
        if self.interpreted:
            return (torch.float32,)
        if self.on_gpu and self.depth == "quick":
            return (torch.bfloat16,)
        return (torch.float32, torch.bfloat16)

    @property
    def sharp(self) -> torch.dtype:
        """Where one dtype has to do: fp32, whose rounding hides least; on a GPU what models use."""
        return torch.bfloat16 if self.on_gpu else torch.float32

    @property
    def num_rows(self) -> int:
        """Rows of a case: on a GPU beyond the last size for which tiles change.

        Multiples of 16 are compiled apart from other numbers: the quick battery has them alone.
        """
        if self.interpreted:
            return 5
        if self.on_gpu:
            return 592 if self.depth == "quick" else 1029
        return ROWS

    @property
    def few_rows(self) -> int:
        """Rows where any number would do; at the quick form's start they compile no more tiles."""
        return min(self.num_rows, 16 if self.on_gpu and self.brief else ROWS)

    @property
    def same(self) -> Same:
        """How two results are compared that must be equal."""
        return _same_values if self.interpreted else assert_same_bits

    def hard(self, *shape: int, **how: Any) -> Tensor:
        """`inputs.hard` on this device."""
        return hard(*shape, device=self.device, **how)


@contextmanager
def named(label: str) -> Iterator[None]:
    """Put a label before a fault's message."""
    try:
        yield
    except Fault as fault:
        raise Fault(f"{label}: {fault}") from None


Check = Callable[[Place], None]


@dataclass
class Operation:
    """The checks of one operation.

    Attributes:
        name: under `isomodels::`.
        covers: the operators that its checks run, gradients included.
        trainable: whether it has gradients.
        long: its kernels take longest to compile, so that a battery's threads begin with it.
        checks: by name.
        outputs: results on fixed inputs, for the digest.
    """

    name: str
    covers: frozenset[str]
    trainable: bool
    long: bool = False
    checks: dict[str, Check] = field(default_factory=dict)
    outputs: Callable[[Place], Iterable[Tensor]] | None = None

    def check(self, name: str) -> Callable[[Check], Check]:
        """Decorator: one more check of this operation."""

        def add(function: Check) -> Check:
            self.checks[name] = function
            return function

        return add

    def runs_on(self, place: Place) -> bool:
        """Whether it has the backend of that place: then it declares its schedule."""
        return (self.name, place.backend) in SCHEDULES

    def names(self, place: Place) -> list[str]:
        """The checks that run there.

        Hard values say nothing about numpy's arithmetic. Before a host starts on a GPU there is
        time to compile for the required checks alone, and for those of `QUICK`.
        """
        names = [name for name in self.checks if place.on_gpu or name != GRAPH]
        if not place.trains:
            names = [name for name in names if name != GRADIENTS]
        if place.interpreted:
            return [name for name in names if name != "hazards"]
        if place.on_gpu and place.depth == "quick":
            return [name for name in names if name in (*REQUIRED, GRAPH, *QUICK)]
        return names


OPERATIONS: dict[str, Operation] = {}


def operation(
    name: str, *gradient_operators: str, trainable: bool = True, long: bool = False
) -> Operation:
    """Declare an operation whose checks follow one by one."""
    OPERATIONS[name] = Operation(name, frozenset({name, *gradient_operators}), trainable, long)
    return OPERATIONS[name]


# The registry of operators


def kernel_folder() -> Path:
    """The folder of the kernels' source."""
    return Path(import_module("isomodels.kernels.schedule").__file__ or "").parent


@functools.cache
def operators() -> dict[str, Any]:
    """Every operator that a kernel file registers under `isomodels::`, by name."""
    found = {}
    for file in sorted(kernel_folder().glob("*.py")):
        if file.stem.endswith("_triton"):
            continue  # registered by the file beside it
        module = import_module(f"isomodels.kernels.{file.stem}")
        for value in vars(module).values():
            if isinstance(value, CustomOpDef):
                found[value._name] = value
    return found


def load_operations() -> dict[str, Operation]:
    """The operations with their checks, by name."""
    folder = Path(__file__).parent / "operations"
    for file in sorted(folder.glob("[!_]*.py")):
        import_module(f"isomodels.validate.operations.{file.stem}")
    return dict(sorted(OPERATIONS.items()))


def missing_checks() -> list[str]:
    """What the battery lacks: one sentence each, none if it is complete."""
    covered: set[str] = set().union(*(op.covers for op in load_operations().values()))
    registered = operators().keys() | {
        name.removeprefix("isomodels::").partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("isomodels::")
    }
    missing = [f"{name}: no operation covers this operator" for name in registered - covered]
    for op in OPERATIONS.values():
        required = REQUIRED if op.trainable else REQUIRED[:-1]
        missing += [f"{op.name}: no check of {name}" for name in required if name not in op.checks]
        if op.outputs is None:
            missing.append(f"{op.name}: no outputs for the digest")
    return sorted(missing)
