"""A table of rules applied: checks, and tensors taken from one side to the other."""

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from isomodels.errors import CheckpointError
from isomodels.weights_conv.bits import LazyTensors, dtype_name, same_bits, shorten
from isomodels.weights_conv.rules import (
    Carried,
    Cropped,
    Resolved,
    Rules,
    Same,
    Source,
    Stored,
    Tied,
    resolve,
)


def check_tensors(
    rules: Rules, hf: Mapping[str, Tensor], *, dtype: torch.dtype | None = None
) -> None:
    """Check names, shapes and dtypes of HF tensors against the rules; meta tensors will do.

    Args:
        rules: the architecture's table.
        hf: HF name -> tensor.
        dtype: what every tensor without a dtype of its own must have; None: anything, but one
            for all.

    Raises:
        CheckpointError: naming all that is missing, left over, misshapen or mistyped.
    """
    chosen = resolve(rules, hf)
    expected = _sources(chosen)
    optional = {rule.name for rule in chosen if isinstance(rule, Tied)}
    if dtype is None:
        dtype = next((hf[n].dtype for n, s in expected.items() if n in hf and not s.dtype), None)
    missing = expected.keys() - optional - hf.keys()
    left_over = hf.keys() - expected.keys()
    shapes: list[str] = []
    mistyped: dict[torch.dtype, list[str]] = {}
    for name in sorted(expected.keys() & hf.keys()):
        tensor = hf[name]
        source = expected[name]
        if tuple(tensor.shape) != source.shape:
            shapes.append(f"{name} is {list(tensor.shape)} instead of {list(source.shape)}")
        wanted = source.dtype or dtype
        fits = tensor.dtype == wanted or (source.or_common and tensor.dtype == dtype)
        if wanted is not None and not fits:
            mistyped.setdefault(wanted, []).append(f"{name} is {dtype_name(tensor.dtype)}")
    problems = []
    if missing:
        problems.append(f"{_count(missing)} missing: {shorten(missing)}")
    if left_over:
        problems.append(f"{_count(left_over)} left over: {shorten(left_over)}{_remedy(left_over)}")
    if shapes:
        problems.append(f"wrong shape: {shorten(shapes)}")
    for wanted, names in mistyped.items():
        problems.append(f"{dtype_name(wanted)} expected: {shorten(names)}")
    if problems:
        raise CheckpointError("the weights do not fit the config: " + "; ".join(problems))


def pinned(rules: Rules) -> dict[str, torch.dtype]:
    """The module's tensors that have a dtype of their own, by name."""
    return {rule.name: rule.dtype for rule in rules if isinstance(rule, Same) and rule.dtype}


def check_tied(rules: Rules, hf: Mapping[str, Tensor]) -> None:
    """Check that a tied tensor which a file repeats has the bits of its twin.

    Raises:
        CheckpointError: naming the two.
    """
    for rule in rules:
        if isinstance(rule, Tied) and rule.name in hf and not same_bits(hf[rule.name], hf[rule.to]):
            raise CheckpointError(
                f"the config ties {rule.name} to {rule.to}, but the file has different "
                "values: set tie_word_embeddings to false, or remove one of the two"
            )


def iter_module(
    rules: Rules,
    hf: Mapping[str, Tensor],
    *,
    carried: bool = True,
    device: torch.device | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Module tensors one by one, from HF tensors that the checks have passed.

    Args:
        rules: the architecture's table.
        hf: HF name -> tensor; may be lazy, each tensor is read when it is needed.
        carried: whether to give the tensors of `Carried` rules.
        device: where they are put together; None: where the HF tensors are.
    """
    for rule in resolve(rules, hf):
        if not isinstance(rule, Tied) and (carried or not isinstance(rule, Carried)):
            yield rule.name, rule.join(_Parts(hf, [s.name for s in rule.sources], device))


def iter_checked(
    rules: Rules,
    hf: Mapping[str, Tensor],
    *,
    dtype: torch.dtype | None = None,
    carried: bool = True,
    device: torch.device | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """HF tensors -> the module's tensors one by one, each HF tensor used once; checked first.

    Args:
        rules: the architecture's table.
        hf: HF name -> tensor.
        dtype: what every tensor must have; None: anything, but one for all.
        carried: whether to give the tensors of `Carried` rules (checked in any case).
        device: as in `iter_module`.

    Raises:
        CheckpointError: at the call, before any tensor is made: naming all that is missing, left
            over, misshapen or mistyped, or a tied tensor with bits of its own.
    """
    check_tensors(rules, hf, dtype=dtype)
    check_tied(rules, hf)
    return iter_module(rules, hf, carried=carried, device=device)


def to_module(
    rules: Rules,
    hf: Mapping[str, Tensor],
    *,
    dtype: torch.dtype | None = None,
    carried: bool = True,
) -> dict[str, Tensor]:
    """HF tensors -> the module's tensors by name: `iter_checked`, all of them."""
    return dict(iter_checked(rules, hf, dtype=dtype, carried=carried))


def to_hf(
    rules: Rules, module: Mapping[str, Tensor], *, optional: Collection[str] = ()
) -> dict[str, Tensor]:
    """The module's tensors -> HF tensors, as views without a copy: the inverse of `to_module`.

    Args:
        rules: the architecture's table; of an `Either`, the experts apart.
        module: module name -> tensor.
        optional: HF names of `Tied` rules to write as well.

    Raises:
        CheckpointError: naming each module tensor that is missing, left over or misshapen.
    """
    chosen = resolve(rules, ())
    stored = check_module(chosen, module)
    hf = {}
    for rule in stored:
        tensors = rule.split(module[rule.name])
        hf.update({source.name: t for source, t in zip(rule.sources, tensors, strict=True)})
    for tied in chosen:
        if isinstance(tied, Tied) and tied.name in optional:
            hf[tied.name] = hf[tied.to]
    return hf


def check_module(rules: Sequence[Resolved], module: Mapping[str, Tensor]) -> list[Stored]:
    """Check names and shapes of the module's tensors; meta tensors will do.

    Returns:
        The rules of the tensors that a module has: those that are not tied to another.

    Raises:
        CheckpointError: naming each module tensor that is missing, left over or misshapen.
    """
    stored = [rule for rule in rules if not isinstance(rule, Tied)]
    expected = {rule.name: rule for rule in stored}
    problems = [f"{name} is missing" for name in expected.keys() - module.keys()]
    problems += [f"{name} has no rule" for name in module.keys() - expected.keys()]
    problems += [
        f"{name} is {list(module[name].shape)} instead of {list(rule.shape)}"
        for name, rule in expected.items()
        if name in module and not _fits(rule, tuple(module[name].shape))
    ]
    if problems:
        raise CheckpointError(f"the module does not fit the rules: {shorten(problems)}")
    return stored


def _fits(rule: Stored, shape: tuple[int, ...]) -> bool:
    if isinstance(rule, Cropped):  # more rows, the rest alike
        return len(shape) > 0 and shape[0] >= rule.shape[0] and shape[1:] == rule.shape[1:]
    return shape == rule.shape


class JoinedTensors(LazyTensors):
    """The module's tensors, made of HF tensors that the checks have passed.

    Args:
        rules: the architecture's table for these names.
        hf: HF name -> tensor.
    """

    def __init__(self, rules: Sequence[Resolved], hf: LazyTensors):
        self._rules = {rule.name: rule for rule in rules if not isinstance(rule, Tied)}
        self._hf = hf
        known = hf.meta()
        super().__init__(
            {
                name: rule.join([known[source.name] for source in rule.sources])
                for name, rule in self._rules.items()
            }
        )

    def __getitem__(self, name: str) -> Tensor:
        rule = self._rules[name]
        return rule.join(_Parts(self._hf, [source.name for source in rule.sources]))


class _Parts(Sequence[Tensor]):
    """Tensors of a mapping, each read when `join` comes to it: one at a time in memory."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        names: Sequence[str],
        device: torch.device | None = None,
    ):
        self._tensors, self._names, self._device = tensors, names, device

    def __getitem__(self, place: int) -> Tensor:  # type: ignore[override]
        tensor = self._tensors[self._names[place]]
        return tensor if self._device is None else tensor.to(self._device)

    def __len__(self) -> int:
        return len(self._names)


class SplitTensors(LazyTensors):
    """HF tensors, made of the module's. The last module tensor read is kept for its neighbours.

    Args:
        rules: the architecture's table; of an `Either`, one form.
        module: module name -> tensor, checked by `check_module`.
    """

    def __init__(self, rules: Sequence[Resolved], module: LazyTensors):
        self._module = module
        self._rules: dict[str, Stored] = {}
        self._last: tuple[Stored | None, dict[str, Tensor]] = (None, {})
        known = module.meta()
        meta: dict[str, Tensor] = {}
        for rule in rules:
            if not isinstance(rule, Tied):
                parts = _named(rule, known[rule.name])
                meta |= parts
                self._rules |= dict.fromkeys(parts, rule)
        super().__init__(meta)

    def __getitem__(self, name: str) -> Tensor:
        rule = self._rules[name]
        if self._last[0] is not rule:
            self.let_go()  # of one before reading the next
            self._last = (rule, _named(rule, self._module[rule.name]))
        return self._last[1][name]

    def let_go(self) -> None:
        """Keep no tensor."""
        self._last = (None, {})


def _named(rule: Stored, tensor: Tensor) -> dict[str, Tensor]:
    parts = rule.split(tensor)
    return {source.name: part for source, part in zip(rule.sources, parts, strict=True)}


def _sources(rules: Sequence[Resolved]) -> dict[str, Source]:
    expected: dict[str, Source] = {}
    for rule in rules:
        for source in rule.sources:
            if source.name in expected:
                raise ValueError(f"two rules use {source.name}")
            expected[source.name] = source
    return expected


def _remedy(left_over: Collection[str]) -> str:
    """Qwen3-Next is released with tensors of a layer that its config.json does not mention."""
    if all(name.startswith("mtp.") for name in left_over):
        return " (to carry them, say mtp_num_hidden_layers in config.json: 1 as released)"
    return ""


def _count(names: Collection[str]) -> str:
    return f"{len(names)} tensor{'' if len(names) == 1 else 's'}"
