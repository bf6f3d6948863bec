"""What an engine keeps from sync to sync: every change of either side is noticed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("vllm", reason="vllm is not installed")

from isomodels.contract import contract_of
from isomodels.errors import CheckpointError
from isomodels.layers.parallel import named_tensors
from isomodels.sync import SharedMemory, WeightSender
from isomodels.sync.blocks import Block, Blocks, Whole, byte_view, to_text
from isomodels.sync.digest import digests
from isomodels.sync.transport import Lent
from isomodels.vllm import LLMSyncClient
from isomodels.vllm.incoming import Plan, copy_in_place
from tests.megatron.bits import assert_all_same_bits
from tests.sync.test_engine import check, weights
from tests.vllm.support import load_core


def text_of(core: nn.Module) -> str:
    return to_text([Block.of(Whole(name, x), 0, 0) for name, x in named_tensors(core).items()])


def plan_of(core: Any) -> Plan:
    return Plan.of(text_of(core), core, {n: list(x.shape) for n, x in named_tensors(core).items()})


def first_linear(core: Any) -> Any:
    return core.model.layers[0].mlp.down_proj


def other_storage(core: Any) -> None:
    first_linear(core).weight.data = first_linear(core).weight.data.clone()


def other_parameter(core: Any) -> None:
    weight = first_linear(core).weight
    first_linear(core).weight = nn.Parameter(weight.detach().clone(), requires_grad=False)


def other_strides(core: Any) -> None:
    weight = first_linear(core).weight
    weight.data = weight.data.as_strided(weight.shape, (1, weight.shape[0]))


def other_dtype(core: Any) -> None:
    weight = first_linear(core).weight
    weight.data = weight.data.view(torch.int16)


def other_order(core: Any) -> None:
    layers = core.model.layers
    layers._modules["0"], layers._modules["1"] = layers[1], layers[0]


def other_name(core: Any) -> None:
    core.model._modules["last_norm"] = core.model._modules.pop("norm")


def one_less(core: Any) -> None:
    del core.model.layers._modules["1"]


def other_buffer(core: Any) -> None:
    core.register_buffer("more", torch.zeros(3))


CHANGES = [
    other_storage,
    other_parameter,
    other_strides,
    other_dtype,
    other_order,
    other_name,
    one_less,
    other_buffer,
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_plan_fits_only_the_module_that_it_was_made_of(folders, change: Callable[[Any], None]):
    core = load_core(folders[0])
    plan, text = plan_of(core), text_of(core)
    assert plan.fits(text, core)
    for tensor in named_tensors(core).values():
        tensor.add_(1)  # other weights in the same places
    assert plan.fits(text, core)
    change(core)
    assert not plan.fits(text, core)


@pytest.mark.parametrize(
    "field", [{"name": "x"}, {"offset": (0,)}, {"shape": (1,)}, {"source": 1}, {"place": 16}]
)
def test_a_plan_fits_only_the_blocks_that_it_was_made_of(folders, field: dict[str, Any]):
    core = load_core(folders[0])
    plan = plan_of(core)
    blocks = Blocks.from_text(text_of(core))
    assert plan.fits(to_text(blocks), core)
    assert not plan.fits(to_text([blocks[0]._replace(**field), *blocks[1:]]), core)
    assert not plan.fits(to_text(blocks[::-1]), core)


@dataclass
class Half:
    """The upper or lower half of a tensor, as a rank of another layout sends it."""

    name: str
    tensor: torch.Tensor
    offset: tuple[int, ...]
    whole: tuple[int, ...]


def halves(tensors: dict[str, torch.Tensor]) -> list[Any]:
    found: list[Any] = []
    for name, x in tensors.items():
        if x.dim() == 1:
            found.append(Whole(name, x))
            continue
        middle = len(x) // 3
        for start, part in ((0, x[:middle]), (middle, x[middle:])):
            found.append(Half(name, part, (start, 0), tuple(x.shape)))
    return found


def assert_served(engine: Any, tensors: dict[str, torch.Tensor]) -> None:
    own = named_tensors(engine._model.core)
    assert_all_same_bits([own[name] for name in tensors], list(tensors.values()))


def test_whole_tensors_and_pieces_by_turns(engine, folders):
    sender = WeightSender(LLMSyncClient(engine.llm), contract_of(folders[0]))
    old, new = weights(folders[0]), weights(folders[1])
    for version, some in enumerate((new, halves(old), halves(new), old, halves(new), new)):
        sender.send(some, str(version))
        kept = some if isinstance(some, dict) else (old if version == 1 else new)
        assert_served(engine, kept)
    check(engine, folders[1])


def test_a_second_trainer_and_its_own_order(engine, folders):
    """Two senders by turns, one with the blocks the other way round."""
    senders = [
        WeightSender(LLMSyncClient(engine.llm), contract_of(folders[0])) for _ in range(2)
    ]  # the second handshake ends the first's plan, not its right to send
    sets = [weights(folders[0]), dict(reversed(weights(folders[1]).items()))]
    for turn in (0, 1, 0, 1, 1, 0):
        senders[turn].send(sets[turn], f"turn of {turn}")
        assert_served(engine, sets[turn])
    check(engine, folders[0])


def test_an_engine_whose_tensors_move_between_syncs(engine, folders):
    """As no engine of ours does: CUDA graphs would read the old ones."""
    sender = WeightSender(LLMSyncClient(engine.llm), contract_of(folders[0]))
    sender.send(weights(folders[0]), "before")
    for name, parameter in engine._model.core.named_parameters():
        if "mlp" in name:
            parameter.data = torch.zeros_like(parameter)
    sender.send(weights(folders[1]), "after")
    assert_served(engine, weights(folders[1]))
    check(engine, folders[1])


def test_a_reload_between_syncs(engine, folders):
    from isomodels.vllm import reload_weights

    sender = WeightSender(LLMSyncClient(engine.llm), contract_of(folders[0]))
    sender.send(weights(folders[0]), "before")
    reload_weights(engine.llm, folders[1])
    assert_served(engine, weights(folders[1]))
    sender.send(weights(folders[0]), "after")
    check(engine, folders[0])


def test_a_trainer_whose_tensors_move_between_syncs(engine, folders):
    sender = WeightSender(LLMSyncClient(engine.llm), contract_of(folders[0]))
    for seed in (0, 1, 1, 0):
        moved = {name: x.detach().clone() for name, x in weights(folders[seed]).items()}
        sender.send(moved, str(seed))
        assert_served(engine, moved)


@pytest.mark.parametrize("fault", ["dtype", "twice", "missing"])
def test_a_known_plan_admits_nothing_else(engine, folders, fault):
    """Refused before anything changes, and the weights that were known are still admitted."""
    sender = WeightSender(LLMSyncClient(engine.llm), contract_of(folders[0]))
    known = weights(folders[0])
    sender.send(known, "known")
    name = "model.norm.weight"
    whole = [Whole(*item) for item in weights(folders[1]).items()]
    if fault == "dtype":
        whole = [Whole(w.name, w.tensor.float() if w.name == name else w.tensor) for w in whole]
    elif fault == "twice":
        whole.append(Whole(name, torch.zeros_like(known[name])))
    else:
        sender.contract.semantic["parameters"].pop(name)
        whole = [w for w in whole if w.name != name]
    with pytest.raises(CheckpointError, match=name):
        sender.send(whole, "refused")
    assert_served(engine, known)
    if fault != "missing":
        sender.send(weights(folders[1]), "new")
        assert_served(engine, weights(folders[1]))


@pytest.mark.parametrize(
    ("field", "change", "message"),
    [
        ("blocks", lambda text: "[[1]]", "the trainer's blocks cannot be read"),
        ("blocks", lambda text: text[:-1], "the trainer's blocks cannot be read"),
        (
            "blocks",
            lambda text: text.replace(", 0]", ", 0.5]"),
            "the trainer's blocks cannot be read",
        ),
        (
            "blocks",
            lambda text: text.replace("bfloat16", "bfloat"),
            "is of bfloat, which is no dtype",
        ),
        ("blocks", lambda text: text.replace(", 0, ", ", 1, "), "lies outside of what it sent"),
        ("blocks", lambda text: text.replace(", 0, ", ", -1, "), "lies outside of what it sent"),
        ("digests", lambda values: [], "the trainer sent 0 digests of"),
        ("digests", lambda values: values * 2, "the trainer sent .* digests of"),
        ("digests", lambda values: [""] * len(values), "damaged on the way"),
        ("digests", lambda values: [None] * len(values), "damaged on the way"),
        ("digests", lambda values: list(reversed(values)), "damaged on the way"),
    ],
)
def test_a_message_that_is_not_whole(engine, folders, monkeypatch, field, change, message):
    client = LLMSyncClient(engine.llm)
    sender = WeightSender(client, contract_of(folders[0]), SharedMemory())
    sender.send(weights(folders[0]), "known")
    real = client.update_weights
    monkeypatch.setattr(
        client, "update_weights", lambda info: real({**info, field: change(info[field])})
    )
    with pytest.raises(CheckpointError, match=message):
        sender.send(weights(folders[1]), "refused")
    assert client.weight_version() == "known"
    assert_served(engine, weights(folders[0]))


@pytest.mark.parametrize("expected", ["", "0", None])
def test_what_is_not_copied_on_the_way_is_compared_with_its_digest(folders, expected):
    """Where blocks are the trainer's own memory (CUDA IPC): after the copy, none is left out."""
    core, new = load_core(folders[0]), weights(folders[1])
    blocks = [Block.of(Whole(*item), number, 0) for number, item in enumerate(new.items())]
    plan = Plan.of(to_text(blocks), core, {name: list(x.shape) for name, x in new.items()})
    lent = Lent([byte_view(x) for x in new.values()], plan.blocks)
    values = [str(value) for value in digests(list(new.values()))]
    copy_in_place(plan, lent, values)
    values[2] = expected
    with pytest.raises(CheckpointError, match=f"after the sync {blocks[2].name} differ"):
        copy_in_place(plan, lent, values)


def test_a_sync_that_broke_off_in_the_trainer_can_be_made_again(engine, folders, monkeypatch):
    """The engine's update is open then, and a start begins anew."""
    sender = WeightSender(LLMSyncClient(engine.llm), contract_of(folders[0]))

    def lost() -> list[int]:
        raise RuntimeError("the trainer's GPU is lost")

    with monkeypatch.context() as patch:
        patch.setattr("isomodels.sync.sender.begin_digests", lambda tensors: lost)
        with pytest.raises(RuntimeError, match="GPU is lost"):
            sender.send(weights(folders[1]), "lost")
    sender.send(weights(folders[1]), "found")
    assert_served(engine, weights(folders[1]))
