"""A small trainer on Megatron's own parts: wrappers, schedule, optimizer, checkpoints.

For the parity command, the tests and small trainings. A user's trainer brings its own loop and
takes only `model_provider`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import set_checkpoint_early_stop

from isomodels.checkpoint import save_checkpoint
from isomodels.config import read_config
from isomodels.errors import HostError
from isomodels.megatron import resume
from isomodels.megatron.packing import Pack, pack
from isomodels.megatron.process import start_process, stop_process
from isomodels.trace import trace_rows


@dataclass(frozen=True)
class StepResult:
    """Of one optimizer step.

    Attributes:
        loss: mean negative logprob over all tokens of this process.
        grad_norm: before clipping.
    """

    loss: float
    grad_norm: float


class Trainer:
    """Trains and scores one checkpoint with Megatron, in data parallelism.

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

    Without a GPU, CUDA devices are redirected to the CPU until `close` (see `cpu_redirect`).

    Raises:
        HostError: if another Trainer of this process is still open, or megatron-core is missing or
            of a version that was not checked.
        ConfigError: for a config.json that cannot be read or asks for what is not implemented.
        UnsupportedError: for an architecture or a dtype that isomodels does not have.
        CheckpointError: for damaged files, tensors that do not fit the config, or another dtype
            than `dtype` without `cast`.
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
    ):
        self.checkpoint = Path(checkpoint)
        self.recompute = recompute
        self.max_tokens = max_tokens
        self.load_balancing = load_balancing
        self.bias_update_rate = bias_update_rate
        self.steps = 0
        start_process()
        self._open = True
        torch.manual_seed(seed)
        try:
            self._build(dtype, recompute, cast, distributed_optimizer, overlap)
            self._build_optimizer(dtype, lr, weight_decay, clip_grad, distributed_optimizer)
        except BaseException:
            self.close()
            raise

    def _build(
        self, dtype: torch.dtype, recompute: bool, cast: bool, distributed: bool, overlap: bool
    ) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.transformer.module import Float16Module

        from isomodels.megatron.provider import model_provider, transformer_config

        overrides: dict[str, Any] = {
            "params_dtype": dtype,
            "calculate_per_token_loss": True,
            "moe_router_bias_update_rate": self.bias_update_rate,
        }
        if recompute:
            overrides |= {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 1,
            }
        if self.load_balancing:
            overrides |= {
                "moe_router_load_balancing_type": "aux_loss",
                "moe_aux_loss_coeff": self.load_balancing,
            }
        _, hf_config = read_config(self.checkpoint)
        config = transformer_config(hf_config, **overrides)
        self.model = model_provider(self.checkpoint, cast=cast)(config=config)
        self.core: Any = self.model.core
        wrapped = Float16Module(config, self.model) if config.bf16 else self.model
        self.ddp = DistributedDataParallel(
            config=config,
            ddp_config=DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                use_distributed_optimizer=distributed,
                overlap_grad_reduce=overlap,
                overlap_param_gather=overlap and distributed,
            ),
            module=wrapped,
        )
        config.finalize_model_grads_func = finalize_model_grads
        if overlap:
            config.no_sync_func = self.ddp.no_sync
            config.param_sync_func = self.ddp.start_param_sync if distributed else None
        self.config = config

    def _build_optimizer(
        self,
        dtype: torch.dtype,
        lr: float,
        weight_decay: float,
        clip_grad: float,
        distributed: bool,
    ) -> None:
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=lr,
                weight_decay=weight_decay,
                clip_grad=clip_grad,
                bf16=dtype == torch.bfloat16,
                params_dtype=dtype,
                use_distributed_optimizer=distributed,
                overlap_param_gather=self.ddp.ddp_config.overlap_param_gather,
            ),
            [self.ddp],
        )
        resume.repair_torch_adam_resume(self.optimizer)
        self.config.grad_scale_func = self.optimizer.scale_loss

    def set_lr(self, lr: float) -> None:
        """Sets the learning rate of the next steps."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def _pack(self, sequences: Sequence[Sequence[int]]) -> list[Pack]:
        device = next(self.core.parameters()).device
        return pack(sequences, self.max_tokens, device)

    # Scoring

    def score(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[Tensor]:
        """Logprobs of given tokens without gradients, as a trainer scores a rollout.

        Args:
            sequences: token ids; each at least one long.
            temperature: logits are divided by it.

        Returns:
            For each sequence of n tokens, [n - 1] fp32: token i + 1 given tokens 0 to i.
        """
        packs = self._pack(sequences)
        self.ddp.eval()
        with torch.no_grad():
            rows = self._run(packs, forward_only=True, temperature=temperature)
        self.ddp.train()
        return _unpack(packs, rows)

    def forward_logprobs(
        self, sequences: Sequence[Sequence[int]], temperature: float = 1.0
    ) -> list[Tensor]:
        """Like `score`, from the forward pass of a training step (its gradients are dropped)."""
        packs = self._pack(sequences)
        with self.model.without_bias_update():
            rows = self._run(packs, temperature=temperature)
        self._drop_gradients()
        return _unpack(packs, rows)

    def recompute_logprobs(
        self, sequences: Sequence[Sequence[int]], temperature: float = 1.0
    ) -> list[Tensor]:
        """Like `score`, from the layers as the backward pass recomputed them.

        Each layer must have run twice a microbatch; the head is then applied to what the second
        run of the last layer gave.

        Raises:
            HostError: without `recompute=True`, or if a layer was not recomputed.
        """
        if not self.recompute:
            raise HostError("recompute_logprobs needs Trainer(..., recompute=True)")
        packs = self._pack(sequences)
        layers = list(self.core.model.layers)
        outputs: dict[nn.Module, list[Any]] = {layer: [] for layer in layers}

        def keep(layer: nn.Module, args: Any, output: Any) -> None:
            outputs[layer].append(output)

        hooks = [layer.register_forward_hook(keep) for layer in layers]
        rows = []
        try:
            for one in packs:
                for kept in outputs.values():
                    kept.clear()
                # early stop would end a recomputed layer before its output exists
                with set_checkpoint_early_stop(False), self.model.without_bias_update():
                    self._run([one])
                if any(len(kept) != 2 for kept in outputs.values()):
                    raise HostError("a layer was not recomputed in the backward pass")
                rows.append(self._head(one, lambda layer, *_: outputs[layer][1], temperature))
        finally:
            for hook in hooks:
                hook.remove()
            self._drop_gradients()
        return _unpack(packs, rows)

    @contextmanager
    def without_recompute(self) -> Iterator[None]:
        """Forward passes that keep every activation, in a trainer that else recomputes them."""
        with self.model.without_recompute():
            yield

    @torch.no_grad()
    def _head(self, one: Pack, run_layer: Callable[..., Any], temperature: float) -> Tensor:
        """[T] logprobs where `run_layer` stands in for every layer."""
        from isomodels.megatron.inputs import read_tokens

        tokens = read_tokens(one.input_ids, None, None, one.params, self.model.max_sequence_length)
        hidden = self.core(tokens.input_ids, tokens.positions, tokens.batch, run_layer=run_layer)
        return self.core.token_logprobs(hidden, one.targets.reshape(-1), temperature)

    @torch.no_grad()
    def trace(self, token_ids: Sequence[int], position: int) -> dict[str, str]:
        """Hashes of what each submodule of the core gives at one token.

        Args:
            token_ids: one sequence.
            position: index of the token.

        Returns:
            {submodule name: hash} in order of execution; see `isomodels.trace`.
        """

        def logprobs(*, hidden_states: Tensor, **_: Any) -> Tensor:
            return self.core.logprobs(hidden_states.squeeze(1))  # [S, 1, H] -> [S, V]

        (one,) = self._pack([token_ids])
        with trace_rows(self.core, position) as hashes:
            self.ddp(
                one.input_ids, None, None, packed_seq_params=one.params, output_processor=logprobs
            )
        return hashes

    # Training

    def step(self, sequences: Sequence[Sequence[int]], *, num_microbatches: int = 1) -> StepResult:
        """One optimizer step on the mean negative logprob over all tokens.

        Args:
            sequences: token ids; each at least two long.
            num_microbatches: at least into how many the sequences are dealt; gradients accumulate.

        Raises:
            ValueError: where no sequence has a token to predict.
            HostError: where Megatron skipped the step.
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

    def _drop_gradients(self) -> None:
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()

    def _run(
        self, packs: list[Pack], *, forward_only: bool = False, temperature: float = 1.0
    ) -> list[Tensor]:
        """Runs Megatron's schedule; returns the logprobs [T] of each microbatch."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        from isomodels.megatron.model import token_logprobs_processor

        rows: list[Tensor] = []

        def forward_step(data: Iterator[Pack], model: nn.Module) -> tuple[Tensor, Any]:
            one = next(data)
            if temperature == 1.0:  # the path of a plain trainer
                loss = model(
                    one.input_ids, None, None, labels=one.targets, packed_seq_params=one.params
                )
            else:
                loss = model(
                    one.input_ids,
                    None,
                    None,
                    labels=one.targets,
                    packed_seq_params=one.params,
                    output_processor=token_logprobs_processor,
                    output_processor_context=temperature,
                ).neg()
            rows.append(loss.detach().neg().view(-1))

            def total(loss: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
                kept = loss.view(-1)[one.keep]
                return kept.sum(), one.keep.sum(dtype=torch.int), {}

            return loss, total

        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(packs),
            model=self.ddp,
            num_microbatches=len(packs),
            seq_length=self.max_tokens,
            micro_batch_size=1,
            forward_only=forward_only,
        )
        return rows

    # Checkpoints

    def save_hf(self, path: str | Path) -> None:
        """Writes the weights as a Hugging Face checkpoint like the one that was loaded.

        Raises:
            CheckpointError: if the folder cannot be written; see `isomodels.checkpoint`.
        """
        if self.ddp.ddp_config.overlap_param_gather:
            self.ddp.start_param_sync(force_sync=True)
        if dist.get_rank() == 0:
            save_checkpoint(self.core, path, like=self.checkpoint)
        dist.barrier()

    def save(self, path: str | Path) -> None:
        """Saves model and optimizer with `dist_checkpointing`; see `resume.save`.

        Raises:
            CheckpointError: if the folder cannot be written.
            HostError: if Megatron's helper process cannot start.
        """
        resume.save(path, self.model, self.optimizer, self.steps)

    def load(self, path: str | Path) -> None:
        """Loads what `save` saved; training goes on bit for bit as if never interrupted.

        Raises:
            CheckpointError: if the folder holds no such training, or another model's.
        """
        self.steps = resume.load(path, self.model, self.optimizer)

    def close(self) -> None:
        """Gives back the process groups of Megatron and torch."""
        if self._open:
            self._open = False
            stop_process()
            # Hooks of Megatron's wrapper hang on autograd nodes, where the collector cannot see
            # them: the wrapper would keep its process groups, and their threads, for good.
            for name in {"ddp", "optimizer"} & vars(self).keys():  # a start that failed has none
                vars(vars(self)[name]).clear()

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _unpack(packs: list[Pack], rows: list[Tensor]) -> list[Tensor]:
    """The rows of each sequence that have a target, in the order of the sequences."""
    return [
        row[start : end - 1].clone()
        for one, row in zip(packs, rows, strict=True)
        for start, end in one.bounds
    ]
