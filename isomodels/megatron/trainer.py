"""A small trainer on Megatron's own parts: wrappers, schedule, optimizer, checkpoints.

For the parity command, the tests and small trainings. A user's trainer brings its own loop and
takes only `model_provider`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from isomodels.checkpoint import save_checkpoint
from isomodels.config import read_config
from isomodels.contract import Contract
from isomodels.contract.stored import require_stored
from isomodels.errors import HostError
from isomodels.megatron import resume
from isomodels.megatron.build import build_models, build_optimizer, wrap_models
from isomodels.megatron.degrees import Degrees
from isomodels.megatron.process import exchanging, start_process, stop_process
from isomodels.megatron.scoring import Scoring
from isomodels.megatron.stages import gather_model


@dataclass(frozen=True)
class StepResult:
    """Of one optimizer step.

    Attributes:
        loss: mean negative logprob over all tokens of this process.
        grad_norm: before clipping.
    """

    loss: float
    grad_norm: float


class Trainer(Scoring):
    """Trains and scores one checkpoint with Megatron.

    All ranks call the same methods. Those of one data parallel rank give the same sequences and
    get the same results; other data parallel ranks may give others.

    Args:
        checkpoint: a Hugging Face checkpoint directory.
        dtype: torch.float32 or torch.bfloat16 (then with fp32 master weights and gradients).
        seed: of torch's generator; the model itself draws nothing.
        lr: learning rate of Adam.
        recompute: recompute every layer's activations in the backward pass.
        distributed_optimizer: shard the optimizer over data parallel ranks.
        weight_decay: of AdamW; not applied to norms and biases.
        clip_grad: largest gradient norm, 0 for none.
        max_tokens: most tokens of one microbatch (a longer sequence is a microbatch alone).
        cast: allow a checkpoint of another dtype.
        overlap: overlap gradient reduction and parameter gathering with compute.
        load_balancing: coefficient of the routers' load-balancing loss; it moves gradients only.
        bias_update_rate: by how much a step moves the routers' correction biases towards balance.
        layout: how the ranks share the model; what is left of them is data parallelism.
        timeout_s: after which a rank that waits for another fails.

    Without a GPU, CUDA devices are redirected to the CPU until `close` (see `cpu_redirect`).

    Raises:
        HostError: if another Trainer of this process is still open, or megatron-core is missing or
            of a version that was not checked.
        ConfigError: for a config.json that cannot be read or asks for what is not implemented.
        UnsupportedError: for an architecture or a dtype that isomodels does not have.
        CheckpointError: for damaged files, tensors that do not fit the config, or another dtype
            than `dtype` without `cast`.
        ContractError: for weights that a training wrote under a contract of other bits.
    """

    def __init__(
        self,
        checkpoint: str | Path,
        *,
        dtype: torch.dtype,
        seed: int = 0,
        lr: float = 1e-3,
        recompute: bool = False,
        distributed_optimizer: bool = True,
        weight_decay: float = 0.0,
        clip_grad: float = 1.0,
        max_tokens: int = 4096,
        cast: bool = False,
        overlap: bool = False,
        load_balancing: float = 0.0,
        bias_update_rate: float = 0.0,
        layout: Degrees = Degrees(),
        timeout_s: float = 600.0,
    ):
        self.checkpoint = Path(checkpoint)
        self.recompute = recompute
        self.max_tokens = max_tokens
        self.layout = layout
        self.steps = 0
        start_process(layout, timeout_s)
        self._open = True
        torch.manual_seed(seed)
        try:
            self.models = build_models(
                self.checkpoint,
                layout,
                dtype=dtype,
                recompute=recompute,
                cast=cast,
                load_balancing=load_balancing,
                bias_update_rate=bias_update_rate,
            )
            self.wrapped = wrap_models(
                self.models, distributed_optimizer=distributed_optimizer, overlap=overlap
            )
            self.config: Any = self.model.config
            self.optimizer = build_optimizer(
                self.config, self.wrapped, lr=lr, weight_decay=weight_decay, clip_grad=clip_grad
            )
        except BaseException:
            self._close(failed=True)
            raise

    # Training

    def set_lr(self, lr: float) -> None:
        """Sets the learning rate of the next steps."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    @exchanging("a training step")
    def step(self, sequences: Sequence[Sequence[int]], *, num_microbatches: int = 1) -> StepResult:
        """One optimizer step on the mean negative logprob over all tokens.

        Args:
            sequences: token ids; each at least two long.
            num_microbatches: at least into how many the sequences are dealt; gradients accumulate.

        Raises:
            ValueError: where no sequence has a token to predict.
            HostError: where Megatron skipped the step.
            LostRankError: where another rank ended or hangs.
        """
        if all(len(sequence) < 2 for sequence in sequences):
            raise ValueError("a training step needs a sequence of at least two tokens")
        per_batch = -(-len(sequences) // num_microbatches)
        packs = [
            one
            for start in range(0, len(sequences), per_batch)
            for one in self._pack(sequences[start : start + per_batch])
        ]
        self._drop_gradients()
        rows = self._run(packs)
        updated, grad_norm, _ = self.optimizer.step()
        if not updated:
            raise HostError("Megatron skipped the optimizer step: a gradient is not finite")
        self.steps += 1
        total = sum(
            float(row[one.keep].double().sum()) for one, row in zip(packs, rows, strict=True)
        )
        count = sum(int(one.keep.sum()) for one in packs)
        return StepResult(loss=-total / count, grad_norm=float(grad_norm))

    # Checkpoints

    def contract(self) -> Contract:
        """What decides the bits of this trainer."""
        from isomodels.megatron.provider import trainer_contract

        return trainer_contract(self.checkpoint, self.model)

    def weights(self) -> dict[str, Tensor] | None:
        """The whole model's tensors by their names in the module; None but on the first rank.

        All ranks call it. Where one rank holds the model, these are its own tensors, not copies.
        """
        whole = self._gathered()
        return None if whole is None else dict(whole.state_dict())

    def _gathered(self) -> Any:
        """See `gather_model`; parameters that are still on their way are waited for."""
        if self.ddp.ddp_config.overlap_param_gather:
            for one in self.wrapped:
                one.start_param_sync(force_sync=True)
        return gather_model(self.models)

    @exchanging("a save")
    def save_hf(self, path: str | Path) -> None:
        """Writes the weights as a Hugging Face checkpoint like the one that was loaded.

        Raises:
            CheckpointError: if the folder cannot be written; see `isomodels.checkpoint`.
        """
        whole = self._gathered()
        if whole is not None:
            contract = self.contract().to_json()
            save_checkpoint(whole, path, like=self.checkpoint, contract=contract)
        dist.barrier()

    @exchanging("a save")
    def save(self, path: str | Path) -> None:
        """Saves model, optimizer and contract with `dist_checkpointing`; see `resume.save`.

        Raises:
            CheckpointError: if the folder cannot be written.
            LostRankError: where another rank ended or hangs; an earlier save is still there.
        """
        contract = self.contract().to_json()
        resume.save(path, self.models, self.optimizer, self.steps, contract)

    def load(self, path: str | Path) -> None:
        """Loads what `save` saved; training goes on bit for bit as if never interrupted.

        Raises:
            CheckpointError: if the folder holds no such training, or another model's.
            ContractError: if it was saved under a contract that gives other bits.
        """
        spec, config = read_config(self.checkpoint)
        device, dtype = next(self.core.parameters()).device, self.config.params_dtype
        require_stored(path, spec, config, device, dtype=dtype)
        self.steps = resume.load(path, self.models, self.optimizer)

    def close(self) -> None:
        """Gives back the process groups of Megatron and torch."""
        self._close(failed=False)

    def _close(self, *, failed: bool) -> None:
        if self._open:
            self._open = False
            stop_process(failed=failed)
            # Hooks of Megatron's wrapper hang on autograd nodes, where the collector cannot see
            # them: the wrapper would keep its process groups, and their threads, for good.
            held = [*vars(self).get("wrapped", ()), vars(self).get("optimizer")]
            for one in held:  # a start that failed has none
                if one is not None:
                    vars(one).clear()

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close(failed=kind is not None)
