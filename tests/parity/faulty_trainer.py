"""A parity trainer with a foreign kernel under an operator's name."""

from typing import Any

import torch
from torch._library.custom_ops import OPDEFS

from isomodels.parity.trainer import ParityTrainer


class FaultyTrainer(ParityTrainer):
    """As `ParityTrainer`, bit for bit: only who registered an operator can tell."""

    def __init__(self, *args: Any, operator: str, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.other = torch.library.Library("isomodels", "IMPL")
        kernel = OPDEFS[f"isomodels::{operator}"]._init_fn
        self.other.impl(operator, lambda *a: kernel(*a), "CPU", allow_override=True)
