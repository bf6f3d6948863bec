"""Makes tests/data/tiny-qwen3: a Qwen3 of 2 million parameters, trained on real text.

A trained model has peaked logits, random weights do not; parity should see both. The text is the
documentation of Python's standard library, the trainer is the project's own Megatron path.

    python tools/train_tiny_qwen3.py OUT [--steps N]
"""

import argparse
import importlib
import inspect
import json
import math
import random
import sys
import tempfile
from pathlib import Path

import torch
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from isomodels.megatron.trainer import Trainer
from isomodels.parity.checkpoints import draw_checkpoint

VOCAB_SIZE = 2048
LENGTH = 256
BATCH = 16
PEAK_LR = 2e-3
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def documentation() -> list[str]:
    """Docstrings of the standard library, each text once, in a fixed order."""
    texts: dict[str, None] = {}
    for name in sorted(sys.stdlib_module_names):
        if name.startswith("_") or name in ("antigravity", "this", "idlelib", "tkinter", "turtle"):
            continue
        try:
            module = importlib.import_module(name)
        except ImportError:  # modules of other platforms
            continue
        for value in [module, *vars(module).values()]:
            members = vars(value).values() if inspect.isclass(value) else ()
            for item in (value, *members):
                doc = getattr(item, "__doc__", None)
                if isinstance(doc, str) and len(doc) > 40:
                    texts.setdefault(inspect.cleandoc(doc))
    return list(texts)


def train_tokenizer(texts: list[str], path: Path) -> Tokenizer:
    """Byte-level BPE."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": CONFIG["max_position_embeddings"],
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    return tokenizer


def start_checkpoint(path: Path) -> None:
    """Random weights: N(0, 0.02), norms 1."""
    generator = torch.Generator().manual_seed(0)

    def draw(name: str, shape: tuple[int, ...]) -> Tensor:
        normal = torch.randn(shape, generator=generator) * 0.02
        return torch.ones(shape) if len(shape) == 1 else normal

    draw_checkpoint(path, CONFIG, draw)


def batches(ids: list[int], steps: int) -> list[list[list[int]]]:
    """Random windows of the text."""
    draw = random.Random(0)
    last = len(ids) - LENGTH
    return [
        [ids[start : start + LENGTH] for start in (draw.randrange(last) for _ in range(BATCH))]
        for _ in range(steps)
    ]


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=600)
    args = parser.parse_args()
    texts = documentation()
    with tempfile.TemporaryDirectory() as folder:
        start = Path(folder)
        start_checkpoint(start)
        tokenizer = train_tokenizer(texts, start)
        ids = [i for text in texts for i in (*tokenizer.encode(text).ids, 0)]
        print(f"{len(texts)} texts, {len(ids)} tokens")
        columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeRemainingColumn())
        with (
            Trainer(start, dtype=torch.bfloat16, lr=PEAK_LR, weight_decay=0.01) as trainer,
            Progress(*columns) as progress,
        ):
            bar = progress.add_task("training", total=args.steps)
            for step, batch in enumerate(batches(ids, args.steps)):
                warm_up = min(1.0, (step + 1) / 40)
                trainer.set_lr(
                    PEAK_LR * warm_up * (0.55 + 0.45 * math.cos(math.pi * step / args.steps))
                )
                loss = trainer.step(batch).loss
                progress.update(bar, advance=1, description=f"loss {loss:.3f}")
            trainer.save_hf(args.out)
    print(f"wrote {args.out}, loss of the last step {loss:.3f}")


if __name__ == "__main__":
    main()
