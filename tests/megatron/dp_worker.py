"""One rank of test_data_parallel: trains on its share, and writes its results."""

import json
import os
import sys
from pathlib import Path

import torch

from isomodels.megatron import Trainer


def work(job: dict, overlap: bool, rank: int, ranks: int) -> None:
    out = Path(job["out"]) / str(overlap)
    with Trainer(
        job["checkpoint"], dtype=torch.bfloat16, clip_grad=0.0, lr=3e-3, overlap=overlap
    ) as trainer:
        share = job["batch"] if ranks == 1 else job["batch"][2 * rank : 2 * rank + 2]
        for _ in range(2):
            trainer.step(share, num_microbatches=2 // ranks)
        scores = [row.view(torch.int32).tolist() for row in trainer.score(job["batch"])]
        trainer.save_hf(out / f"{ranks}_ranks")
    (out / f"{ranks}_ranks_{rank}.json").write_text(json.dumps(scores))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for overlap in (False, True):
        work(json.loads(sys.argv[1]), overlap, int(os.environ["RANK"]), 2)
