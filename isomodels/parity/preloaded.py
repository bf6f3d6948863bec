"""What ranks of a trainer import, once for all of them: the process that they are forked from."""

import importlib
import warnings

_MODULES = (
    "megatron.core.distributed",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "isomodels.megatron.model",
    "isomodels.megatron.provider",
    "isomodels.parity.trainer",
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # each rank has a log for its own, this process has none
    for _name in _MODULES:
        importlib.import_module(_name)
