"""The contract: which digest a change moves, what is refused, and that it tells the truth."""

import json
import os
import re
import threading
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from typer.testing import CliRunner

from isomodels.cli.main import app
from isomodels.contract import SECTIONS, Contract, contract_of, differences, require_same
from isomodels.contract.build import schedules_of, served
from isomodels.contract.document import canonical, canonical_json
from isomodels.contract.operations import CASES, OperationCount
from isomodels.errors import ContractError, IsoError
from isomodels.kernels.schedule import SCHEDULES, Schedule
from isomodels.registry import architectures, load_object
from tests.dense.models import load_ours, make, run_packed, tokens

NAMES = sorted(architectures())


def tiny(name: str) -> dict:
    return {**load_object(architectures()[name].tiny), "dtype": "bfloat16"}


def on(backend: str, name: str) -> Contract:
    """The contract of a tiny model on the CPU, or on an H200 that need not be here."""
    if backend == "torch":
        return contract_of(tiny(name))
    return contract_of(tiny(name), "cuda", capability=(9, 0))


def moved(left: Contract, right: Contract) -> set[str]:
    return {name for name in SECTIONS if left.digests[name] != right.digests[name]}


@pytest.mark.parametrize("name", NAMES)
def test_every_architecture_has_a_contract_that_survives_json(name):
    contract = contract_of(tiny(name))
    again = Contract.from_json(contract.to_json())
    assert again.digests == contract.digests
    assert not differences(contract, again)
    # laid out anew, the content is the same
    assert Contract.from_json(json.dumps(json.loads(contract.to_json()), indent=2)) == again
    assert all(served(contract, case) for case in CASES)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("name", NAMES)
def test_each_constant_of_each_schedule_moves_the_numerical_digest_alone(
    name, backend, monkeypatch
):
    contract = on(backend, name)
    policy = contract.numerical_policy
    ran = {op for form in policy["forms"].values() for part in form.values() for op in part}
    assert set(policy["schedules"]) == ran
    for operation in policy["schedules"]:
        schedule = SCHEDULES[operation, backend]
        changed = [replace(schedule, version=schedule.version + 1)]
        for key, value in schedule.constants.items():
            other = value + 1 if isinstance(value, int) else f"{value}, otherwise"
            changed.append(replace(schedule, constants={**schedule.constants, key: other}))
        for one in changed:
            monkeypatch.setitem(SCHEDULES, (operation, backend), one)
            now = {**policy, "schedules": schedules_of(policy["forms"], backend)}
            other = replace(contract, numerical_policy=now)
            assert moved(contract, other) == {"numerical_policy"}, one
            monkeypatch.setitem(SCHEDULES, (operation, backend), schedule)
    linear = SCHEDULES["linear", backend]
    monkeypatch.setitem(SCHEDULES, ("linear", backend), replace(linear, version=99))
    assert moved(contract, on(backend, name)) == {"numerical_policy"}


def test_an_operation_that_does_not_run_moves_nothing(monkeypatch):
    contract = contract_of(tiny("Qwen3ForCausalLM"))
    other = Schedule("mla_attention", "torch", 99, {"kv_block": 1})
    monkeypatch.setitem(SCHEDULES, ("mla_attention", "torch"), other)
    assert not moved(contract, contract_of(tiny("Qwen3ForCausalLM")))


# Tiles, programs and launches of the GPU's kernels: which file, and what it holds.
TUNING = {
    "gemm_tuned": ["TUNED"],
    "gemm_tuning": ["BUCKETS", "DEFAULTS"],
    "attention_decode_triton": ["_PROGRAMS"],
    "mla_decode_triton": ["_PROGRAMS", "_PART_BYTES"],
    "grouped_linear_triton": ["_FORWARD"],
    "grouped_gemm_triton": ["_GROUP", "_CHUNK"],
    "gated_delta_triton": ["WALK", "DECODE"],
    "causal_conv_triton": ["_EDGE_CHANNELS"],
    "router_triton": ["_FEW", "_MANY"],
    "swiglu_triton": ["_BLOCK"],
}


@pytest.mark.parametrize(
    "name",
    [
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "Qwen3_5MoeForCausalLM",
    ],
)
def test_tuning_moves_nothing(name, monkeypatch):
    pytest.importorskip("triton")
    contract = on("triton", name)
    for file, names in TUNING.items():
        module = import_module(f"isomodels.kernels.{file}")
        for one in names:
            assert hasattr(module, one)
            monkeypatch.setattr(module, one, None)
    assert not moved(contract, on("triton", name))


def test_a_layout_moves_the_deployment_alone():
    hosts = [contract_of(tiny("Qwen3ForCausalLM"), host={"layout": x}) for x in ("tp1", "tp2")]
    assert moved(*hosts) == {"deployment"}
    require_same(*hosts)


def test_what_moves_which_digest():
    plain = contract_of(tiny("Qwen3ForCausalLM"))
    raw = tiny("Qwen3ForCausalLM")
    assert moved(plain, contract_of(raw | {"rope_theta": 5e5})) == {"semantic"}
    assert moved(plain, contract_of(raw, dtype=torch.float32)) == {"numerical_policy"}
    gpus = [contract_of(raw, "cuda", capability=c) for c in ((9, 0), (8, 0))]
    assert moved(*gpus) == {"numerical_policy"}
    assert "numerical_policy" in moved(plain, gpus[0])


def test_the_refusal_names_what_differs_on_both_sides():
    raw = tiny("Qwen3ForCausalLM")
    trainer, engine = contract_of(raw), contract_of(raw | {"rms_norm_eps": 1e-5})
    require_same(trainer, contract_of(raw))
    with pytest.raises(ContractError, match=r"semantic.*config\.rms_norm_eps: .*1e-06.* against"):
        require_same(trainer, engine)
    with pytest.raises(ContractError, match=r"numerical_policy\.dtype: \"bfloat16\" against"):
        require_same(contract_of(raw, dtype=torch.bfloat16), contract_of(raw, dtype=torch.float32))


def test_a_degree_outside_the_claims_is_refused():
    raw = tiny("Qwen3ForCausalLM")
    plain = contract_of(raw)
    claimed = plain.numerical_policy["layouts"]["tensor_parallel"]
    for degree in claimed:
        require_same(contract_of(raw, host={"tensor_parallel": degree}), plain)
    for sides in ((3, 1), (1, 64)):
        trainer, engine = (contract_of(raw, host={"tensor_parallel": n}) for n in sides)
        with pytest.raises(ContractError, match=r"tensor_parallel of (3|64) is not shown"):
            require_same(trainer, engine)


def test_floats_are_bit_patterns():
    close = 0.1 + 0.2
    assert canonical_json({"x": close}) != canonical_json({"x": 0.3})
    assert canonical_json({"x": 0.0}) != canonical_json({"x": -0.0})
    assert canonical_json({"x": 1.0}) != canonical_json({"x": 1})
    assert canonical({"x": 1.0}) == {"x": "float64 bits 3ff0000000000000"}
    with pytest.raises(TypeError, match="set"):
        canonical({"x": {1}})


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["numerical_policy"].update(dtype="float32"),
        lambda d: d["digests"].update(semantic="0" * 64),
        lambda d: d.pop("deployment"),
        lambda d: d.pop("digests"),
        lambda d: d.update(format=0),
    ],
)
def test_a_changed_document_is_refused(change):
    document = json.loads(contract_of(tiny("Qwen3ForCausalLM")).to_json())
    change(document)
    with pytest.raises(ContractError):
        Contract.from_json(json.dumps(document))
    with pytest.raises(ContractError, match="no JSON"):
        Contract.from_json(b"\xff{")


@pytest.mark.parametrize("name", ["qwen3", "mimo"])
def test_the_stated_operations_are_those_that_run(tmp_path, name):
    folder = make(name, tmp_path / name)
    contract, model, ids = contract_of(folder), load_ours(folder), tokens(20)
    with torch.no_grad(), OperationCount() as ran:
        model.token_logprobs(run_packed(model, ids), ids)
    form = contract.numerical_policy["forms"]["packed"]
    assert ran.counts == {**form["forward"], **form["logprobs"]}
    assert set(ran.counts) == served(contract, "trainer_forward")


def test_the_command(tmp_path):
    run = CliRunner().invoke
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    raw = tiny("Qwen3ForCausalLM")
    (tmp_path / "a" / "config.json").write_text(json.dumps(raw))
    (tmp_path / "b" / "config.json").write_text(json.dumps(raw | {"rope_theta": 5e5}))
    shown = run(app, ["contract", "show", str(tmp_path / "a")])
    assert shown.exit_code == 0
    assert contract_of(raw).digests["numerical_policy"] in shown.stdout
    stored = tmp_path / "a.json"
    stored.write_text(run(app, ["contract", "show", str(tmp_path / "a"), "--json"]).stdout)
    same = run(app, ["contract", "diff", str(stored), str(tmp_path / "a")])
    assert (same.exit_code, same.stdout) == (0, "no difference\n")
    other = run(app, ["contract", "diff", str(stored), str(tmp_path / "b"), "--json"])
    assert other.exit_code == 1
    assert [d["path"] for d in json.loads(other.stdout)] == ["config.rope_theta"]
    for wrong in (["show", str(tmp_path)], ["show", str(tmp_path / "a"), "--dtype", "int8"]):
        refused = run(app, ["contract", *wrong])
        assert refused.exit_code == 2
        assert refused.stderr.startswith("error: ")


def test_a_contract_of_the_model_alone_is_shown(tmp_path):
    """What a conversion writes beside the weights of a source that was never run."""
    full = contract_of(tiny("Qwen3ForCausalLM"))
    part, whole = tmp_path / "part", tmp_path / "whole"
    part.write_text(Contract(full.semantic, {}, {}).to_json())
    whole.write_text(full.to_json())
    shown = CliRunner().invoke(app, ["contract", "show", str(part)])
    assert shown.exit_code == 0, shown.output
    assert [line.split() for line in shown.stdout.splitlines()] == [
        ["semantic", full.digests["semantic"]],
        ["numerical_policy", "not", "stated"],
        ["deployment", "not", "stated"],
        ["architecture", "Qwen3ForCausalLM"],
    ]
    told = CliRunner().invoke(app, ["contract", "diff", str(part), str(whole)])
    assert told.exit_code == 1
    assert told.stdout.endswith("differs in deployment, numerical_policy\n")
    with pytest.raises(ContractError, match="the trainer's contract states no deployment"):
        require_same(Contract(full.semantic, full.numerical_policy, {}), full)


def test_a_pipe_is_read(tmp_path):
    """As the shell's `<(ssh engine isomodels contract show ...)` gives one."""
    text, pipe = contract_of(tiny("Qwen3ForCausalLM")).to_json(), tmp_path / "pipe"
    (tmp_path / "file").write_text(text)
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_text(text), daemon=True)
    writer.start()
    told = CliRunner().invoke(app, ["contract", "diff", str(pipe), str(tmp_path / "file")])
    assert (told.exit_code, told.stdout) == (0, "no difference\n"), told.output


def _with(section, path, value):
    """A contract with sound digests whose value at a path is another; None: is absent."""

    def make(document):
        place = document[section]
        for key in path[:-1]:
            place = place[key]
        if value is None:
            del place[path[-1]]
        else:
            place[path[-1]] = value
        sections = (document[name] for name in ("semantic", "numerical_policy", "deployment"))
        return Contract(*sections).to_json()

    return make


def _nested(depth):
    return lambda _: (
        '{"format":1,"semantic":'
        + '{"a":' * depth
        + "1"
        + "}" * depth
        + ',"numerical_policy":{},"deployment":{},"digests":{}}'
    )


# No contract, and what the message must say of it.
NONE = {
    "nothing": (lambda _: "", "is no JSON"),
    "null": (lambda _: "null", "is no contract of format 1"),
    "a list": (lambda _: "[]", "is no contract of format 1"),
    "a config": (lambda _: json.dumps(tiny("Qwen3ForCausalLM")), "is no contract of format 1"),
    "bytes": (lambda _: b"\x93\xff\x00", "is no JSON"),
    "half a character": (_with("semantic", ["architecture"], "\ud800"), "is no JSON"),
    **{f"{n} deep": (_nested(n), "") for n in (300, 450, 600, 900, 100_000)},
    "no architecture": (_with("semantic", ["architecture"], None), "semantic has no architecture"),
    "pinned": (_with("numerical_policy", ["pinned"], []), "numerical_policy.pinned is no object"),
    "no forms": (_with("numerical_policy", ["forms"], None), "numerical_policy has no forms"),
    "calls": (
        _with("numerical_policy", ["forms", "packed", "forward", "linear"], "7"),
        "numerical_policy.forms.packed.forward.linear is no whole number",
    ),
    "version": (
        _with("numerical_policy", ["schedules", "linear", "version"], True),
        "numerical_policy.schedules.linear.version is no whole number",
    ),
    "degrees": (
        _with("numerical_policy", ["layouts", "tensor_parallel"], [1, "2"]),
        r"numerical_policy.layouts.tensor_parallel\[1\] is no whole number",
    ),
    "host": (_with("deployment", ["host"], "vllm"), "deployment.host is no object"),
}


@pytest.mark.parametrize("kind", NONE)
def test_what_is_no_contract_is_one_sentence(tmp_path, kind):
    """On either side of a `diff`, and to `show`."""
    make, message = NONE[kind]
    good, bad = contract_of(tiny("Qwen3ForCausalLM")), tmp_path / "bad.json"
    text = make(json.loads(good.to_json()))
    bad.write_bytes(text if isinstance(text, bytes) else text.encode())
    (tmp_path / "good.json").write_text(good.to_json())
    for arguments in (["show", bad], ["diff", bad, "good.json"], ["diff", "good.json", bad]):
        paths = [str(tmp_path / one) if one == "good.json" else str(one) for one in arguments]
        told = CliRunner().invoke(app, ["contract", *paths])
        assert (told.exit_code, told.stdout) == (2, ""), told.output
        assert told.stderr.startswith(f"error: {bad}")
        assert told.stderr.count("\n") == 1
        assert re.search(message, told.stderr)


def test_a_device_that_is_not_here_is_refused():
    with pytest.raises(IsoError, match=r"CUDA|no device cuda"):
        contract_of(tiny("Qwen3ForCausalLM"), "cuda:77")
    with pytest.raises(IsoError, match="capability"):
        contract_of(tiny("Qwen3ForCausalLM"), "cpu", capability=(9, 0))
