"""The execution contract: what decides every bit of a logprob, as data that two sides compare."""

from isomodels.contract.build import contract_for, contract_of
from isomodels.contract.compare import Difference, differences, require_same
from isomodels.contract.document import SECTIONS, Contract

__all__ = [
    "SECTIONS",
    "Contract",
    "Difference",
    "contract_for",
    "contract_of",
    "differences",
    "require_same",
]
