"""Experts, latent attention and the gated delta rule: engine against Megatron, operation by
operation, and the first that differs by name."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._library.custom_ops import OPDEFS
from typer.testing import CliRunner

pytest.importorskip("vllm", reason="vllm is not installed")
pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from isomodels.cli.main import app
from isomodels.layers.parallel import named_tensors
from isomodels.parity.checkpoints import random_checkpoint, tiny_config
from isomodels.trace import Recording, compare
from isomodels.vllm import Engine, Request
from tests.vllm.support import draw

pytestmark = pytest.mark.slow
ISOMODELS = Path(sys.executable).with_name("isomodels")
LIMITS = {
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "block_size": 16,
    "num_gpu_blocks_override": 40,
    "skip_tokenizer_init": True,
    "enable_prefix_caching": False,
}
# in two chunks and over the end of one of the delta rule's; two together
REQUESTS = [Request(draw(n, n), max_tokens=m) for n, m in ((70, 10), (40, 30))]
# Into pages, by operators of their own; Qwen3-MoE's rope does it.
WRITES: dict[str, dict[str, int]] = {
    "Qwen3MoeForCausalLM": {},
    "Glm4MoeLiteForCausalLM": {"write_latent_cache": 3},
    "Qwen3_5MoeForCausalLM": {"write_kv_cache": 1},
}
# Operators of the engine, one bit of whose last output is turned, and a weight that is changed.
FAMILIES = {
    "Qwen3MoeForCausalLM": (("route", "moe_combine"), "mlp.experts.down_proj"),
    "Glm4MoeLiteForCausalLM": (("paged_mla_attention", "moe_combine"), "self_attn.kv_b_proj"),
    "Qwen3_5MoeForCausalLM": (
        ("paged_causal_conv", "paged_gated_delta_rule", "gated_rms_norm", "sigmoid_gate"),
        "linear_attn.out_proj",
    ),
}


class Side:
    """An engine of a tiny model, and a trainer's recording of what it sampled."""

    def __init__(self, architecture: str, path: Path, engine: Engine):
        self.architecture, self.engine = architecture, engine
        folder = self.folder = path.parent
        self.sequences, self.sound = self.record("engine", REQUESTS)
        (folder / "ids.json").write_text(json.dumps(self.sequences))
        command = [ISOMODELS, "trace", "record", path, folder / "trainer", "--host", "megatron"]
        made = subprocess.run(
            [*map(str, command), "--ids", str(folder / "ids.json")], capture_output=True, text=True
        )
        assert made.returncode == 0, made.stderr
        self.trainer = Recording.load(folder / "trainer")

    def record(self, name: str, requests: list[Request]) -> tuple[list[list[int]], Recording]:
        """The sequences that were sampled, and the recording of them."""
        ask = self.engine.llm.collective_rpc
        ask("isomodels_trace_start")
        results = self.engine.run(requests, seed=1)
        ask("isomodels_trace_stop", kwargs={"path": str(self.folder / name)})
        sequences = [[*result.prompt, *(token.id for token in result.tokens)] for result in results]
        return sequences, Recording.load(self.folder / name)

    def diff(self, name: str) -> str:
        """What the command prints of a recording of the engine beside the trainer's."""
        both = [str(self.folder / one) for one in (name, "trainer")]
        shown = CliRunner().invoke(app, ["trace", "diff", *both])
        assert shown.exit_code == 1
        return shown.stdout


@pytest.fixture(scope="module", params=FAMILIES)
def side(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("family") / "drawn"
    path = random_checkpoint(folder, tiny_config(request.param), "bfloat16", 0)
    with Engine(path, dtype="bfloat16", **LIMITS) as engine:
        yield Side(request.param, path, engine)


def test_every_operation_agrees_with_megatron(side):
    assert len(side.engine.steps) > 20
    found = compare(side.sound, side.trainer)
    assert found.first is None, found.first
    # the last token of each is sampled and never computed
    assert found.tokens == sum(len(sequence) - 1 for sequence in side.sequences)
    assert (found.differing, found.weights) == (0, ())
    assert (found.only_left, found.only_right) == ((), ())
    # beside its targets' the trainer's recording has the logprobs of the whole vocabulary
    assert (found.own_left, found.own_right) == (WRITES[side.architecture], {"token_logprobs": 1})
    compared = {
        (operation.module, operation.operator)
        for entry in side.trainer.entries
        for operation in entry.form.operations
        if operation.outputs and operation.operator != "token_logprobs"
    }
    assert found.operations == len(compared)


def test_one_bit_of_an_operation_of_the_engine_is_named(side):
    operators, _ = FAMILIES[side.architecture]
    decoder = next(e.form for e in side.sound.entries if e.form.section == "decoder")
    for operator in operators:
        modules = [op.module for op in decoder.operations if op.operator == operator]
        at, calls = len(modules) // 2, 0
        sound = OPDEFS[f"isomodels::{operator}"]._init_fn

        def faulty(*args, sound=sound, at=at, count=len(modules), **kwargs):
            nonlocal calls
            out = sound(*args, **kwargs)
            if calls % count == at:
                last = [out, *(out if isinstance(out, tuple | list) else ())][-1]
                words = last.view({2: torch.int16, 4: torch.int32}[last.element_size()])
                words[-1].view(-1)[0] ^= 1  # of the newest token of a step
            calls += 1
            return out

        other = torch.library.Library("isomodels", "IMPL")
        try:
            other.impl(operator, faulty, "CPU", allow_override=True)
            side.record("faulty", REQUESTS[:1])
        finally:
            other._destroy()
        assert calls
        found = compare(Recording.load(side.folder / "faulty"), side.trainer)
        first = found.first
        assert first is not None
        assert (first.module, first.left_operator) == (modules[at], operator)
        assert (first.position, first.earlier) == (63, 63)  # the last of the first chunk
        assert not [value for value in first.inputs if value.differs]
        shown = side.diff("faulty")
        assert "first difference: token 63 " in shown
        assert f"operation: {modules[at]} {operator}" in shown


def test_a_weight_of_the_engine_that_differs_is_named_as_an_input(side):
    _, part = FAMILIES[side.architecture]
    tensors = named_tensors(side.engine._model.core)
    name = [one for one in tensors if part in one][-1]
    before = tensors[name].clone()
    tensors[name].neg_()
    try:
        side.record("faulty", REQUESTS[:1])
    finally:
        tensors[name].copy_(before)
    found = compare(Recording.load(side.folder / "faulty"), side.trainer)
    assert found.weights == (name,)
    first = found.first
    assert first is not None
    assert first.position == 0
    assert name.startswith(first.module)
    assert [value.source for value in first.inputs if value.differs] == [f"weight {name}"]
    assert f"weights that differ: {name}" in side.diff("faulty")
