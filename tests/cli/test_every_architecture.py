"""`check` of a checkpoint of every architecture, with all that is only carried."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from isomodels.checkpoint import open_checkpoint
from isomodels.cli.main import app
from isomodels.parity.checkpoints import random_checkpoint, tiny_config
from isomodels.registry import architectures


def numbers(folder: Path, **options: Any) -> int:
    """How many a module holds; a tied head once."""
    core = open_checkpoint(folder).build(device="meta", **options)
    return sum(tensor.numel() for tensor in core.state_dict().values())


@pytest.mark.parametrize("architecture", sorted(architectures()))
def test_check_counts_what_is_only_carried(architecture: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    random_checkpoint(folder, tiny_config(architecture), "bfloat16", 0, "cpu")
    result = CliRunner().invoke(app, ["check", str(folder), "--json"])
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    carried = numbers(folder, carry_mtp=True) - numbers(folder)
    assert facts["carried_parameters"] == carried
    people = CliRunner().invoke(app, ["check", str(folder)])
    assert people.exit_code == 0, people.output
    assert f"{facts['parameters']:,} in bfloat16" in people.stdout
