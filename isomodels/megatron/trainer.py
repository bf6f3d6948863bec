"""A small trainer on Megatron's own parts: wrappers, schedule, optimizer, checkpoints.

For the parity command, the tests and small trainings. A user's trainer brings its own loop and
takes only `model_provider`.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import set_checkpoint_early_stop

from isomodels.checkpoint import save_checkpoint
from isomodels.config import read_config
from isomodels.errors import HostError
from isomodels.layers.routes import Routes
from isomodels.megatron import resume
from isomodels.megatron.layout import Degrees
from isomodels.megatron.packing import Pack, pack
from isomodels.megatron.process import start_process, stop_process
from isomodels.megatron.stages import (
    LayerOutputs,
    from_last_stage,
    gather_model,
    record_layers,
    routes_by_layer,
    unwrap,
)
from isomodels.trace import trace_rows

if TYPE_CHECKING:
    from isomodels.megatron.model import IsoLanguageModel


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
        self.load_balancing = load_balancing
        self.bias_update_rate = bias_update_rate
        self.layout = layout
        self.steps = 0
        start_process(layout, timeout_s)
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
            **self.layout.overrides(),
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
        provider = model_provider(self.checkpoint, cast=cast)
        self.models = [
            provider(*ends, vp_stage=vp_stage, config=config) for *ends, vp_stage in _stages()
        ]
        self.wrapped = [
            DistributedDataParallel(
                config=config,
                ddp_config=DistributedDataParallelConfig(
                    grad_reduce_in_fp32=True,
                    use_distributed_optimizer=distributed,
                    overlap_grad_reduce=overlap,
                    overlap_param_gather=overlap and distributed,
                ),
                module=Float16Module(config, model) if config.bf16 else model,
                disable_bucketing=number > 0,  # as in Megatron's own set-up of virtual stages
            )
            for number, model in enumerate(self.models)
        ]
        config.finalize_model_grads_func = finalize_model_grads
        if overlap:
            no_sync = [one.no_sync for one in self.wrapped]
            sync = [one.start_param_sync for one in self.wrapped] if distributed else None
            single = len(self.wrapped) == 1
            config.no_sync_func = no_sync[0] if single else no_sync
            config.param_sync_func = sync[0] if sync and single else sync
        self.config = config

    # The model of a rank without virtual stages: all there is, where there is one stage.

    @property
    def model(self) -> "IsoLanguageModel":
        """The first virtual stage of this rank."""
        return self.models[0]

    @property
    def ddp(self) -> Any:
        """Its wrapper."""
        return self.wrapped[0]

    @property
    def core(self) -> Any:
        """Its isomodels module."""
        return self.model.core

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
            self.wrapped,
        )
        resume.repair_torch_adam_resume(self.optimizer)
        self.config.grad_scale_func = self.optimizer.scale_loss

    def set_lr(self, lr: float) -> None:
        """Sets the learning rate of the next steps."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def _pack(self, sequences: Sequence[Sequence[int]]) -> list[Pack]:
        device = next(self.core.parameters()).device
        multiple = self.layout.tp  # of tokens, which may be cut into slices
        return pack(sequences, self.max_tokens, device, multiple=multiple)

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
        for one in self.wrapped:
            one.eval()
        with torch.no_grad():
            rows = self._run(packs, forward_only=True, temperature=temperature)
        for one in self.wrapped:
            one.train()
        return _unpack(packs, rows)

    def forward_logprobs(
        self, sequences: Sequence[Sequence[int]], temperature: float = 1.0
    ) -> list[Tensor]:
        """Like `score`, from the forward pass of a training step (its gradients are dropped)."""
        packs = self._pack(sequences)
        with self._each_model("without_bias_update"):
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
        rows: list[Tensor] = []
        try:
            for one in packs:
                # virtual stages take several microbatches: the same one, so that any run will do
                copies = [one] * (self.layout.pp if self.layout.vpp > 1 else 1)
                # early stop would end a recomputed layer before its output exists
                with (
                    set_checkpoint_early_stop(False),
                    self._each_model("without_bias_update"),
                    record_layers(self.models) as outputs,
                ):
                    self._run(copies)
                if any(len(runs) != 2 * len(copies) for runs in outputs.values()):
                    raise HostError("a layer was not recomputed in the backward pass")
                rows.append(self._head(one, outputs, temperature))
        finally:
            self._drop_gradients()
        return _unpack(packs, rows)

    def split_routes(
        self, recorded: Sequence[Routes], sequences: Sequence[Sequence[int]]
    ) -> list[npt.NDArray[np.int32]]:
        """Routes of a forward pass, sequence by sequence.

        Args:
            recorded: what `record_routes` kept of each of `models`.
            sequences: those that were run.

        Returns:
            For each sequence of n tokens, [n, layers with experts, k] of the whole model.
        """
        packs = self._pack(sequences)
        layers = routes_by_layer(self.models, recorded)  # [tokens of all microbatches, k] each
        rows, first = [], 0
        for one in packs:
            rows += [range(first + start, first + end) for start, end in one.bounds]
            first += one.input_ids.numel()
        whole = np.stack(layers, 1)
        return [np.ascontiguousarray(whole[list(kept)]) for kept in rows]

    @contextmanager
    def without_recompute(self) -> Iterator[None]:
        """Forward passes that keep every activation, in a trainer that else recomputes them."""
        with self._each_model("without_recompute"):
            yield

    @contextmanager
    def _each_model(self, context: str) -> Iterator[None]:
        with ExitStack() as stack:
            for model in self.models:
                stack.enter_context(getattr(model, context)())
            yield

    @torch.no_grad()
    def _head(self, one: Pack, outputs: LayerOutputs, temperature: float) -> Tensor:
        """[T] logprobs from what the last layer gave in its last run, a recomputed one."""
        rows = []
        last = self.models[-1]
        if last.post_process:
            *_, runs = outputs.values()
            core = last.core
            hidden = core.finish(core.model.norm(*runs[-1])[0])
            rows = [core.token_logprobs(hidden, one.targets.reshape(-1), temperature)]
        return from_last_stage(rows, [one])[0]

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
        for one in self.wrapped:
            one.zero_grad_buffer()
        self.optimizer.zero_grad()

    def _run(
        self, packs: list[Pack], *, forward_only: bool = False, temperature: float = 1.0
    ) -> list[Tensor]:
        """Runs Megatron's schedule; returns the logprobs [T] of each microbatch."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        from isomodels.megatron.model import token_logprobs_processor

        rows: list[Tensor] = []
        packs_run = [*packs, *self._idle(packs)]

        def forward_step(data: Iterator[Pack], model: nn.Module) -> tuple[Tensor, Any]:
            one = next(data)
            processor: dict[str, Any] = {}
            if temperature != 1.0:  # else the path of a plain trainer
                processor = {
                    "output_processor": token_logprobs_processor,
                    "output_processor_context": temperature,
                }
            loss = model(
                one.input_ids,
                None,
                None,
                labels=one.targets,
                packed_seq_params=one.params,
                **processor,
            )
            if not unwrap(model).post_process:
                return loss, None  # the next stage's input
            if processor:
                loss = loss.neg()
            rows.append(loss.detach().neg().view(-1))

            def total(loss: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
                kept = loss.view(-1)[one.keep]
                return kept.sum(), one.keep.sum(dtype=torch.int), {}

            return loss, total

        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(packs_run) for _ in self.wrapped],
            model=self.wrapped,
            num_microbatches=len(packs_run),
            seq_length=self.max_tokens,
            micro_batch_size=1,
            forward_only=forward_only,
        )
        return from_last_stage(rows[: len(packs)], packs)

    def _idle(self, packs: list[Pack]) -> list[Pack]:
        """Microbatches without a target: virtual stages take as many as a multiple of stages."""
        if self.layout.vpp == 1:
            return []
        missing = -len(packs) % self.layout.pp
        return self._pack([[0]]) * missing

    # Checkpoints

    def weights(self) -> dict[str, Tensor] | None:
        """The whole model's tensors by their names in the module; None but on the first rank.

        All ranks call it. Where one rank holds the model, these are its own tensors, not copies.
        """
        if self.ddp.ddp_config.overlap_param_gather:
            for one in self.wrapped:
                one.start_param_sync(force_sync=True)
        whole = gather_model(self.models)
        return None if whole is None else dict(whole.state_dict())

    def save_hf(self, path: str | Path) -> None:
        """Writes the weights as a Hugging Face checkpoint like the one that was loaded.

        Raises:
            CheckpointError: if the folder cannot be written; see `isomodels.checkpoint`.
        """
        if self.ddp.ddp_config.overlap_param_gather:
            for one in self.wrapped:
                one.start_param_sync(force_sync=True)
        whole = gather_model(self.models)
        if whole is not None:
            save_checkpoint(whole, path, like=self.checkpoint)
        dist.barrier()

    def save(self, path: str | Path) -> None:
        """Saves model and optimizer with `dist_checkpointing`; see `resume.save`.

        Raises:
            CheckpointError: if the folder cannot be written.
            HostError: if Megatron's helper process cannot start.
        """
        resume.save(path, self.models, self.optimizer, self.steps)

    def load(self, path: str | Path) -> None:
        """Loads what `save` saved; training goes on bit for bit as if never interrupted.

        Raises:
            CheckpointError: if the folder holds no such training, or another model's.
        """
        self.steps = resume.load(path, self.models, self.optimizer)

    def close(self) -> None:
        """Gives back the process groups of Megatron and torch."""
        if self._open:
            self._open = False
            stop_process()
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
        self.close()


def _stages() -> Iterator[tuple[bool, bool, int | None]]:
    """For each virtual stage of this rank: whether it is the first and the last of all, and its
    number (None without virtual ones)."""
    from megatron.core import parallel_state

    virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=True)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    if virtual is None:
        yield first, last, None
        return
    for number in range(virtual):
        yield first and number == 0, last and number == virtual - 1, number


def _unpack(packs: list[Pack], rows: list[Tensor]) -> list[Tensor]:
    """The rows of each sequence that have a target, in the order of the sequences."""
    return [
        row[start : end - 1].clone()
        for one, row in zip(packs, rows, strict=True)
        for start, end in one.bounds
    ]
