"""Only views, copies and `isomodels::` operators run in a forward: nothing else does arithmetic."""

import functools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from isomodels.batch import Batch
from tests.dense.models import ARCHITECTURES, Engine, bounds, tokens
from tests.kernel.battery import DTYPES

COPIES = {"aten::clone", "aten::copy_", "aten::_to_copy", "aten::_unsafe_view", "aten::detach"}


def is_view(func):
    """All results alias an argument that is not written to."""
    results = func._schema.returns
    aliases = [result.alias_info for result in results]
    return bool(aliases) and all(alias and not alias.is_write for alias in aliases)


class OnlyOurs(TorchDispatchMode):
    """Raises at the first operator that computes and is not ours, naming it and its module."""

    def __init__(self, model):
        super().__init__()
        self.seen, self.where = set(), ["no module"]
        self.hooks = []
        for name, module in model.named_modules():
            enter = functools.partial(self._enter, name)
            self.hooks.append(module.register_forward_pre_hook(enter))
            self.hooks.append(module.register_forward_hook(self._leave))

    def _enter(self, name, *_):
        self.where.append(name)

    def _leave(self, *_):
        self.where.pop()

    def __exit__(self, *error):
        for hook in self.hooks:
            hook.remove()
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func._schema.name
        self.seen.add(name)
        allowed = name.startswith("isomodels::") or is_view(func) or name in COPIES
        if name in ("aten::_to_copy", "aten::copy_"):  # a cast rounds
            source = args[1] if name == "aten::copy_" else args[0]
            allowed = out.dtype == source.dtype
        assert allowed, f"{name} computes in {self.where[-1] or 'the model'}"
        return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_only_our_operators_compute_in_a_trainer(ours, name, dtype):
    model, ids = ours(name, dtype), tokens(33)
    batch, positions = Batch.packed(bounds([20, 13])), Batch.positions(bounds([20, 13]))
    for grad in (False, True):
        model.requires_grad_(grad)
        try:
            with torch.set_grad_enabled(grad), OnlyOurs(model) as mode:
                hidden = model(ids, positions, batch)
                model.logits(hidden), model.logprobs(hidden), model.logprobs(hidden, 0.6)
                model.token_logprobs(hidden, ids)
        finally:
            model.requires_grad_(False)
        assert "isomodels::attention" in mode.seen


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_only_our_operators_compute_in_an_engine(ours, name, dtype):
    model, ids = ours(name, dtype), tokens(20)
    engine = Engine(model, [20])
    engine.step({0: ids[:19]})
    call = model.forward

    def watched(*args, **kwargs):
        with OnlyOurs(model) as mode:
            out = model.logprobs(call(*args, **kwargs))
        assert {"isomodels::paged_attention", "isomodels::rope_qkv_to_cache"} <= mode.seen
        return out

    engine.model = watched
    assert engine.step({0: ids[19:]}).shape == (1, 512)


@pytest.mark.parametrize(
    ("wrong", "operator"),
    [
        (lambda x: x * 1.0, "aten::mul"),
        (lambda x: x.double().float(), "aten::_to_copy"),
        (lambda x: torch.nn.functional.silu(x), "aten::silu"),
        (lambda x: x.add_(0.0), "aten::add_"),
        (lambda x: x + 0, "aten::add"),
    ],
)
def test_the_watch_can_fail(ours, wrong, operator):
    model, ids = ours("mimo"), tokens(33)
    hook = model.model.layers[2].mlp.down_proj.register_forward_hook(lambda m, a, out: wrong(out))
    batch, positions = Batch.packed(bounds([33])), torch.arange(33)
    where = r"model\.layers\.2\.mlp"
    try:
        with (
            OnlyOurs(model),
            pytest.raises(AssertionError, match=f"{operator} computes in {where}"),
        ):
            model(ids, positions, batch)
    finally:
        hook.remove()
