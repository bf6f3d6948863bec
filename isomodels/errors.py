"""Errors whose message is written for the person who caused them."""


class IsoError(Exception):
    """Base of all: names the thing and the remedy in a line or two; the command exits with 2."""


class ConfigError(IsoError):
    """A config.json that cannot be read, or that asks for what is not implemented."""


class CheckpointError(IsoError):
    """Weights that are missing, left over, damaged, or of the wrong shape or dtype."""


class UnsupportedError(IsoError):
    """A model, option or device that isomodels cannot run with equal bits."""


class HostError(IsoError):
    """vLLM or Megatron is missing, or is a version that was not checked."""


class LostRankError(IsoError):
    """Another process of a training ended, or did not answer within the timeout."""


class ContractError(IsoError):
    """Two sides that would not give the same bits, or a contract that cannot be read."""


class TraceError(IsoError):
    """A run that cannot be recorded, or recordings that cannot be read or compared."""
