"""Recordings of a module: every operation is seen, and a wrong bit in any is named."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from typer.testing import CliRunner

from isomodels.batch import Batch
from isomodels.checkpoint import load_checkpoint
from isomodels.cli.main import app
from isomodels.contract.operations import OperationCount
from isomodels.errors import TraceError
from isomodels.layers.parallel import Layout, TensorParallel
from isomodels.parity.checkpoints import random_checkpoint, tiny_config
from isomodels.registry import load_object
from isomodels.trace import Choice, Recording, compare, record
from isomodels.trace.recorder import Operation, Recorder

# dense, latent attention with experts, gated delta rule with gated attention and experts
NAMES = ["Qwen3ForCausalLM", "Glm4MoeLiteForCausalLM", "Qwen3_5MoeForCausalLM"]
LENGTHS = [7, 12, 5]
IDS = torch.randint(100, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
BOUNDS = torch.tensor([0, *LENGTHS]).cumsum(0).int()


class Fault(TorchDispatchMode):
    """Turns one bit of a row that the `at`-th operator of the project gives, in its last output."""

    def __init__(self, at, row):
        super().__init__()
        self.at, self.row, self.seen, self.name = at, row, 0, None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.namespace != "isomodels":
            return out
        if self.seen == self.at:
            self.name = func._opname
            tensor = [out, *(out if isinstance(out, tuple | list) else ())][-1]
            words = tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])
            words[self.row].view(-1)[3 % words[self.row].numel()] ^= 1
        self.seen += 1
        return out


@pytest.fixture(scope="module", params=NAMES)
def core(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("core") / "drawn"
    raw = tiny_config(request.param)
    return load_checkpoint(random_checkpoint(folder, raw, "bfloat16", 0))


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dense") / "drawn"
    return load_checkpoint(random_checkpoint(folder, tiny_config(NAMES[0]), "bfloat16", 0))


def run(core, ids=IDS, bounds=BOUNDS):
    with torch.no_grad():
        return core(ids, Batch.positions(bounds), Batch.packed(bounds))


def recorded(core, path, **options):
    with record(core, path, **options):
        run(core)
    return Recording.load(path)


def operations(recording):
    return [op for entry in recording.entries for op in entry.form.operations]


def test_every_operation_is_recorded_and_nothing_moves(core, tmp_path):
    expected = run(core)
    with OperationCount() as ran:
        core.logprobs(run(core))
    with record(core, tmp_path / "a"):
        hidden = run(core)
    assert hidden.view(torch.int16).equal(expected.view(torch.int16))
    recording = Recording.load(tmp_path / "a")
    found = [op.operator for op in operations(recording)]
    assert {name: found.count(name) for name in found} == dict(ran.counts)
    assert recording.position.tolist() == [p for n in LENGTHS for p in range(n)]
    assert recording.ids.tolist() == IDS.tolist()
    assert all(len(e.tokens) == len(IDS) for e in recording.entries)
    # alone, each sequence in a run of its own, a token has the digests that it has in a batch
    with record(core, tmp_path / "b", names=["x", "y", "z"]):
        for start, end in zip(BOUNDS[:-1].tolist(), BOUNDS[1:].tolist(), strict=True):
            run(core, IDS[start:end], torch.tensor([0, end - start], dtype=torch.int32))
    other = Recording.load(tmp_path / "b")
    same = compare(recording, other)
    assert (same.tokens, same.differing, same.first) == (len(IDS), 0, None)
    assert (same.only_left, same.only_right, same.weights) == ((), (), ())
    # but for the sort, whose rows are no tokens, every operation is compared
    assert same.operations == len(
        {(op.module, op.operator) for op in operations(recording) if op.outputs}
    )


def test_what_is_overwritten_later_has_the_digest_of_its_time(dense, tmp_path):
    def overwrite(module, inputs, output):
        kept = output.clone()
        output.zero_()
        return kept

    sound = recorded(dense, tmp_path / "sound")
    hook = dense.get_submodule("model.layers.0.mlp.gate_up_proj").register_forward_hook(overwrite)
    try:
        other = recorded(dense, tmp_path / "other")
    finally:
        hook.remove()

    def outputs(recording):
        return [
            entry.digests[:, column].tolist()
            for entry in recording.entries
            for operation in entry.form.operations
            for column in operation.outputs.values()
        ]

    assert outputs(other) == outputs(sound)


def test_what_a_host_alone_must_do_is_no_difference(dense, tmp_path):
    sound = recorded(dense, tmp_path / "sound")

    def wrote(name, *layers):
        """As an engine records it that writes the tokens of these layers into pages."""
        entry = next(e for e in sound.entries if e.form.section == "decoder")
        writes = [Operation(f"model.layers.{layer}.self_attn", name, {}, {}) for layer in layers]
        form = replace(entry.form, operations=[*entry.form.operations, *writes])
        return replace(sound, entries=[replace(entry, form=form)])

    for name in ("write_kv_cache", "write_latent_cache"):
        for left, right in ((wrote(name, 0, 1), sound), (sound, wrote(name, 0, 1))):
            found = compare(left, right)
            assert not any(name in label for label in (*found.only_left, *found.only_right))
            owns = (found.own_left, found.own_right)
            assert owns == (({name: 2}, {}) if right is sound else ({}, {name: 2}))
        # of two engines, one of which left a layer out
        found = compare(wrote(name, 0, 1), wrote(name, 0))
        assert found.only_left == (f"model.layers.1.self_attn {name}",)
        assert (found.own_left, found.own_right) == ({}, {})
    found = compare(wrote("swiglu", 0, 1), sound)
    assert len(found.only_left) == 2
    assert found.own_left == {}


def test_one_bit_of_any_operation_is_named(core, tmp_path):
    sound = recorded(core, tmp_path / "sound", logprobs=False)
    every = operations(sound)
    row, (sequence, position) = 10, (1, 3)  # row 10 of the batch is token 3 of sequence 1
    seen = 0
    for at, operation in enumerate(every):
        # those whose rows are no tokens, or which compute from weights alone, are named below
        if operation.operator in ("moe_sort", "one_plus", "grouped_linear"):
            continue
        if operation.operator == "swiglu" and operation.module.endswith("experts"):
            continue
        if at % (3 if len(every) < 40 else 8):  # some of each kind
            continue
        with Fault(at, row) as fault:
            wrong = recorded(core, tmp_path / "wrong", logprobs=False)
        assert fault.name == operation.operator
        found = compare(sound, wrong)
        first = found.first
        assert first is not None, operation
        assert (first.module, first.left_operator) == (operation.module, operation.operator)
        assert (first.sequence, first.position) == (str(sequence), position)
        assert (first.token_id, first.earlier) == (int(IDS[row]), position)
        assert not any(value.differs for value in first.inputs)
        seen += 1
    assert seen > 5


@pytest.mark.parametrize("operator", ["grouped_linear", "one_plus"])
def test_faults_in_rows_by_place_and_in_weights_alone(tmp_path, operator):
    path = random_checkpoint(tmp_path / "c", tiny_config(NAMES[2]), "bfloat16", 0)
    core = load_checkpoint(path)
    sound = recorded(core, tmp_path / "sound")
    at = [i for i, op in enumerate(operations(sound)) if op.operator == operator][3]
    with Fault(at, 0):
        wrong = recorded(core, tmp_path / "wrong")
    first = compare(sound, wrong).first
    assert first is not None
    assert (first.module, first.left_operator) == (operations(sound)[at].module, operator)


def test_a_weight_that_differs_is_told_as_an_input(dense, tmp_path):
    sound = recorded(dense, tmp_path / "a")
    weight = dense.model.layers[1].mlp.down_proj.weight
    before = weight.data.clone()
    weight.data[5, 7] += 1
    try:
        found = compare(sound, recorded(dense, tmp_path / "b"))
    finally:
        weight.data.copy_(before)
    name = "model.layers.1.mlp.down_proj"
    assert found.weights == (f"{name}.weight",)
    assert found.first is not None
    assert found.first.module == name
    assert {value.name: value.differs for value in found.first.inputs} == {
        "x": False,
        "weight": True,
    }
    assert found.differing > len(IDS) // 2
    assert set(found.places) == {f"{name} row_linear"}


def test_weights_of_one_buffer_keep_their_names(tmp_path):
    """As Megatron's wrapper lays them: all parameters are views of one storage."""
    path = random_checkpoint(tmp_path / "c", tiny_config(NAMES[1]), "bfloat16", 0)
    core = load_checkpoint(path)
    sound = recorded(core, tmp_path / "a")
    alike = [p for p in core.parameters() if p.dtype == torch.bfloat16]
    flat = torch.cat([p.detach().flatten() for p in alike])
    for part, p in zip(flat.split([p.numel() for p in alike]), alike, strict=True):
        p.data = part.view(p.shape)
    same = recorded(core, tmp_path / "b")
    inputs = [[op.inputs for op in operations(one)] for one in (sound, same)]
    assert inputs[0] == inputs[1]
    named = {x for one in inputs[1] for x in one.values() if str(x).startswith("weight ")}
    assert len(named) > 20
    with torch.no_grad():
        core.model.layers[1].self_attn.kv_b_proj.weight.neg_()
    first = compare(sound, recorded(core, tmp_path / "c.trace")).first
    assert first is not None
    assert [value.source for value in first.inputs if value.differs] == [
        "weight model.layers.1.self_attn.kv_b_proj.weight"
    ]


def test_chosen_tokens_alone(dense, tmp_path):
    everything = recorded(dense, tmp_path / "all")
    some = recorded(dense, tmp_path / "some", choice=Choice.parse("1", "2,9:"))
    assert [some.sequences[i] for i in some.sequence] == ["1"] * 4
    assert some.position.tolist() == [2, 9, 10, 11]
    found = compare(some, everything)
    assert (found.tokens, found.differing) == (4, 0)


@pytest.mark.parametrize("text", ["x", "3:2", "-1", "4:x", "1,,2"])
def test_positions_that_are_none_are_refused(text):
    with pytest.raises(TraceError, match="give numbers and ranges"):
        Choice.parse(None, text)


def test_gradients_come_and_recompute_is_not_recorded(dense, tmp_path):
    from torch.utils.checkpoint import checkpoint

    def backward():
        batch = Batch.positions(BOUNDS), Batch.packed(BOUNDS)
        layer = lambda module, *args: checkpoint(module, *args, use_reentrant=False)  # noqa: E731
        hidden = dense(IDS, *batch, run_layer=layer)
        dense.token_logprobs(hidden, IDS).sum().backward()
        grads = {n: p.grad.clone() for n, p in dense.named_parameters()}
        dense.zero_grad()
        return grads

    expected = backward()
    with record(dense, tmp_path / "a"):
        grads = backward()
    assert all(grads[n].view(torch.int16).equal(g.view(torch.int16)) for n, g in expected.items())
    again = compare(Recording.load(tmp_path / "a"), recorded(dense, tmp_path / "b"))
    assert (again.tokens, again.differing) == (len(IDS), 0)


def test_what_cannot_be_recorded_is_refused(dense, tmp_path):
    with pytest.raises(TraceError, match="no chosen token"), record(dense, tmp_path / "a"):
        pass
    weight = dense.model.norm.weight.data
    before = weight.clone()
    changing = record(dense, tmp_path / "a")
    changing.__enter__()
    run(dense)
    weight.add_(1)
    with pytest.raises(TraceError, match="weights changed"):
        changing.__exit__(None, None, None)
    weight.copy_(before)
    with (
        pytest.raises(TraceError, match="cannot be written"),
        record(dense, tmp_path / "no" / "such" / "folder"),
    ):
        run(dense)
    part = load_object("isomodels.dense.qwen3.model:Qwen3ForCausalLM")(
        dense.config,
        dtype=torch.bfloat16,
        device=torch.device("meta"),
        layout=Layout(TensorParallel(size=2)),
    )
    with pytest.raises(TraceError, match="one rank"):
        Recorder(part)
    # nothing was left behind on the module
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in dense.modules())


def test_recordings_without_a_token_in_common_are_refused(dense, tmp_path):
    left = recorded(dense, tmp_path / "a")
    with record(dense, tmp_path / "b"):
        run(dense, (IDS + 1) % 100)
    with pytest.raises(TraceError, match="no token with one history"):
        compare(left, Recording.load(tmp_path / "b"))


def _cut(path):
    path.write_bytes(path.read_bytes()[:-9])


def _empty(path):
    path.write_bytes(b"")


def _another(path):
    save_file({"x": torch.zeros(3)}, path)


def _shorter(path):
    tensors = load_file(path)
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors["ids"] = tensors["ids"][:-1].clone()
    save_file(tensors, path, metadata)


@pytest.mark.parametrize("damage", [_cut, _empty, _another, _shorter])
def test_damaged_files_are_one_sentence(dense, tmp_path, damage):
    recorded(dense, tmp_path / "a")
    damage(tmp_path / "a")
    with pytest.raises(TraceError, match=str(tmp_path / "a")):
        Recording.load(tmp_path / "a")


def test_the_command(tmp_path):
    path = random_checkpoint(tmp_path / "c", tiny_config(NAMES[0]), "bfloat16", 0)
    (tmp_path / "ids.json").write_text(json.dumps([[1, 2, 3, 4, 5], [6, 7, 8]]))
    invoke = CliRunner().invoke
    ids = ["--ids", str(tmp_path / "ids.json")]
    for name in ("a", "b"):
        made = invoke(app, ["trace", "record", str(path), str(tmp_path / name), *ids])
        assert made.exit_code == 0, made.output
        assert "8 tokens of 2 sequences" in made.stdout
        if name == "a":  # another weight for the other side
            file = path / "model.safetensors"
            tensors = load_file(file)
            tensors["model.layers.1.self_attn.o_proj.weight"][0].neg_()
            save_file(tensors, file, {"format": "pt"})
    both = [str(tmp_path / name) for name in ("a", "b")]
    same = invoke(app, ["trace", "diff", both[0], both[0]])
    assert same.exit_code == 0
    assert same.stdout.endswith("no difference\n")
    shown = invoke(app, ["trace", "diff", *both])
    assert shown.exit_code == 1
    assert "operation: model.layers.1.self_attn.o_proj row_linear, output 0" in shown.stdout
    assert "first difference: token 0 (id 1) of sequence 0" in shown.stdout
    lines = [line.split() for line in shown.stdout.splitlines() if line.startswith("  input")]
    assert [line[1:3] for line in lines] == [["x", "equal"], ["weight", "DIFFERS"]]
    found = json.loads(invoke(app, ["trace", "diff", *both, "--json"]).stdout)
    assert found["first"]["module"] == "model.layers.1.self_attn.o_proj"
    (tmp_path / "far.json").write_text("[[1], [2, 100000]]")
    (tmp_path / "long.json").write_text(json.dumps([[1], [2] * 2049]))
    record_to = ["record", str(path), str(tmp_path / "c.trace")]
    for wrong, word in (
        (["diff", both[0], str(tmp_path / "none")], "there is no recording"),
        ([*record_to, "--ids", str(tmp_path / "far.json")], "token 1 of sequence 1 is 100000"),
        ([*record_to, "--ids", str(tmp_path / "long.json")], "sequence 1 has 2,049 tokens"),
    ):
        refused = invoke(app, ["trace", *wrong])
        assert refused.exit_code == 2, wrong
        assert refused.stderr.startswith("error: ")
        assert word in refused.stderr
