"""One rank of test_bridge: a model of several ranks through Megatron-Bridge."""

import json
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.utils import unwrap_model

from isomodels.errors import UnsupportedError
from isomodels.megatron.bridge import iso_bridge
from isomodels.megatron.degrees import Degrees
from isomodels.megatron.process import start_process, stop_process
from isomodels.megatron.scoring import Scoring


def main(checkpoint: str, layout: str, sequences: list[list[int]], out: str) -> None:
    degrees = Degrees.parse(layout)
    start_process(degrees, 60.0)
    bridge = iso_bridge(checkpoint)
    provider = bridge.to_megatron_provider()
    fields = degrees.overrides()
    if provider.num_moe_experts is None:  # as frameworks leave it; Megatron makes it tp
        fields["expert_tensor_parallel_size"] = None
    provider.apply_overrides_and_finalize(dtype=torch.bfloat16, overrides=fields)
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    models = provider.provide_distributed_model(ddp_config=ddp, bf16=True)
    scoring = Scoring()
    scoring.wrapped, scoring.models = models, unwrap_model(models)
    scoring.layout, scoring.max_tokens = degrees, 100
    assert not any(model.layout.whole for model in scoring.models)
    rows = [row.view(torch.int32).tolist() for row in scoring.score(sequences)]
    Path(out, f"{dist.get_rank()}.json").write_text(json.dumps(rows))
    bridge.save_hf_pretrained(models, Path(out) / "saved")
    with pytest.raises(UnsupportedError, match="send one in parts"):
        bridge.export_hf_weights(models)
    stop_process()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(**json.loads(sys.argv[1]))
