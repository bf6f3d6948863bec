"""Parity of a model that fits its device only once: its forward passes, one side after the other.

Nothing is trained and nothing is stored: both sides draw their weights on the device, from one
seed. The engine has ended when the trainer begins.
"""

from pathlib import Path
from typing import Any

from isomodels.config import read_config
from isomodels.parity.cases import sequence
from isomodels.parity.remote import Remote, threads
from isomodels.parity.run import (
    PHASES,
    Place,
    Report,
    Say,
    check_device,
    check_operations,
    compare,
    empty_report,
    sample,
)
from isomodels.parity.workload import PromptSource, Workload


def run_forward_only(
    config_folder: Path, *, device: str, seed: int, workload: Workload, say: Say
) -> Report:
    """Compare engine and trainer on drawn weights: `run_parity` of its first phase.

    Args:
        config_folder: has a config.json, and a tokenizer or none.
        device, seed, workload, say: as of `run_parity`.

    Returns:
        The report, without the case that a backward pass makes.

    Raises:
        IsoError: for a config, device or host that cannot be used.
    """
    check_device(device)
    report = empty_report(config_folder, device, seed, workload)
    report.forward_only = True
    shared: dict[str, Any] = {"dtype": report.dtype, "seed": seed}
    source = PromptSource(config_folder, read_config(config_folder)[1].vocab_size, seed)
    say("starting vLLM")
    with Remote(
        "engine",
        "isomodels.parity.engine:ParityEngine",
        environment=threads(device),
        checkpoint=str(config_folder),
        device=device,
        workload=report.workload,
        draw_seed=seed,
        **shared,
    ) as engine:
        engine.result()
        report.model_runner = engine.call("model_runner")
        results = list(sample(report, PHASES[0], engine, source, say))
        check_operations(report, {"engine": engine})
    say("the engine has ended; starting Megatron")
    with Remote(
        "trainer",
        "isomodels.parity.forward_trainer:ForwardTrainer",
        environment=threads(device),
        config_folder=str(config_folder),
        max_tokens=report.workload.microbatch,
        **shared,
    ) as trainer:
        for made in results:
            trainer.submit("cases", [sequence(result) for result in made])
        trainer.result()
        say("the trainer scores the same tokens")
        compare(report, PHASES[0], results, trainer)
        check_operations(report, {"trainer": trainer})
    if (first := report.phases[PHASES[0]].first) is not None:
        report.place = Place(PHASES[0], first, None, ())
    return report
