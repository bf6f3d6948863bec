"""What every operation's tests share: the battery that ships, and torch's own checks of operators.

The functions live in `isomodels.validate`, where `isomodels validate` runs them on a user's device.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from isomodels.validate import rows
from isomodels.validate.accuracy import assert_gradients, relative_rms, unit_error
from isomodels.validate.bits import assert_same_bits, bits
from isomodels.validate.inputs import DTYPES, KINDS, hard, layouts, odd_storage
from isomodels.validate.rows import ROWS, THREADS, threads

__all__ = [
    "DTYPES",
    "KINDS",
    "ROWS",
    "THREADS",
    "assert_gradients",
    "assert_registered",
    "assert_row_invariant",
    "assert_same_bits",
    "bits",
    "hard",
    "layouts",
    "odd_storage",
    "relative_rms",
    "threads",
    "uninitialised_is_nan",
    "unit_error",
]


def assert_row_invariant(op: rows.RowFunction, x: Tensor, *, poison: bool = True) -> None:
    """Each row of op(x) must depend on that row of x alone, however it is stored."""
    rows.assert_row_invariant(op, x, poison=poison)
    rows.assert_storage_does_not_matter(op, x)


def assert_registered(op: Any, args: tuple, *, trainable: bool = True) -> None:
    """torch's own checks of an operator: schema, aliasing, fake against real, autograd.

    Not the check under ahead-of-time dispatch, which takes seconds (see the tests marked slow).
    """
    tests = ["test_schema", "test_faketensor"] + ["test_autograd_registration"] * trainable
    torch.library.opcheck(op, args, test_utils=tests)


@contextmanager
def uninitialised_is_nan() -> Iterator[None]:
    """New memory comes filled with NaN: a row that a kernel leaves out shows."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
