"""The trainer that `benchmarks.rl_step` compares with: plain torch, without Megatron.

bf16 parameters, gradients added up and master weights in fp32, clipping, fused AdamW: what
Megatron's DDP and distributed optimizer keep too. The model is `benchmarks.plain_model` for a dense
one, with every layer and the head compiled, and transformers' own for one with experts: scaled dot
product attention, grouped products, flash-linear-attention's delta rule, norms and head compiled.
"""

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isomodels.checkpoint import load_checkpoint
from isomodels.config import read_config
from isomodels.registry import load_object
from isomodels.weights_conv.rules import Tied, resolve

CONFIGURATIONS = 3

# ids and next tokens [B, S] -> logprobs of the next tokens [B, S] fp32
Logprobs = Callable[[Tensor, Tensor], Tensor]


class StockTrainer:
    """Trains on sequences of one length.

    Args:
        checkpoint: a folder with the weights.
        lr: learning rate.
        max_tokens: of a microbatch.
        device: where.

    Attributes:
        name: what it is, for the table.
    """

    def __init__(self, checkpoint: Path, lr: float, max_tokens: int, device: str):
        self.checkpoint, self.max_tokens, self.device = checkpoint, max_tokens, device
        self.spec, self.config = read_config(checkpoint)
        plain = self.spec.architecture == "Qwen3ForCausalLM"
        make = plain_model if plain else transformers_model
        self.name, self.model, self.logprobs = make(checkpoint, device)
        self.parameters: list[Any] = list(self.model.parameters())
        self.master = [p.detach().float() for p in self.parameters]
        for master, parameter in zip(self.master, self.parameters, strict=True):
            master.grad = torch.zeros_like(master)
            parameter.register_post_accumulate_grad_hook(_add_to(master.grad))
        self.optimizer = torch.optim.AdamW(self.master, lr=lr, weight_decay=0.0, fused=True)

    def update(self, samples: Sequence[Any], clipped_loss: Callable[..., Tensor]) -> Any:
        """One step on the clipped objective.

        Args:
            samples: of `examples/grpo/grpo.py`.
            clipped_loss: its objective.

        Returns:
            (loss, gradient norm, new logprobs, old logprobs) like its `Update`.
        """
        ids = torch.tensor([[*s.prompt, *s.answer] for s in samples], device=self.device)  # [N, S]
        lengths = {len(s.answer) for s in samples}
        (length,) = lengths  # of one length, all
        old = torch.tensor([s.logprobs.tolist() for s in samples], device=self.device)  # [N, A]
        advantage = torch.tensor([s.advantage for s in samples], device=self.device)
        count = old.numel()
        rows, losses = [], []
        for part in torch.arange(len(ids)).split(max(1, self.max_tokens // ids.shape[1])):
            one = ids[part]
            new = self.logprobs(one, one.roll(-1, 1))[:, -length - 1 : -1]  # [B, A]
            weight = advantage[part, None].expand_as(new)
            loss = clipped_loss(new, old[part], weight) / count
            loss.backward()
            losses.append(loss.detach())
            rows.append(new.detach())
        norm = self._step()
        logprobs = torch.cat(rows).flatten().cpu().numpy()
        return float(torch.stack(losses).sum()), norm, logprobs, old.flatten().cpu().numpy()

    @torch.no_grad()
    def _step(self) -> float:
        gradients = [master.grad for master in self.master if master.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        torch._foreach_mul_(gradients, (1.0 / (norm + 1e-6)).clamp(max=1.0))
        self.optimizer.step()
        torch._foreach_copy_(self.parameters, self.master)
        torch._foreach_zero_(gradients)
        return float(norm)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The parameters under the names that vLLM's own model loads."""
        if self.name.startswith("transformers"):
            yield from ((name, p.detach()) for name, p in self.model.named_parameters())
            return
        ours = {name: p.detach() for name, p in self.model.named_parameters()}
        for rule in resolve(load_object(self.spec.weights)(self.config), ()):
            if not isinstance(rule, Tied):
                parts = rule.split(ours[rule.name])
                names = (source.name for source in rule.sources)
                yield from zip(names, parts, strict=True)


def _add_to(total: Tensor) -> Callable[[nn.Parameter], None]:
    def add(parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        total.add_(parameter.grad)
        parameter.grad = None

    return add


def plain_model(checkpoint: Path, device: str) -> tuple[str, nn.Module, Logprobs]:
    """`benchmarks.plain_model` with the checkpoint's weights."""
    from benchmarks.plain_model import PlainModel

    _, config = read_config(checkpoint)
    compiled = device == "cuda"
    model = PlainModel(config, compiled=compiled, dtype=config.torch_dtype, device=device)
    if config.tie_word_embeddings:
        model.lm_head = model.model.embed_tokens
    model.loss = torch.compile(head_logprobs) if compiled else head_logprobs
    source = dict(load_checkpoint(checkpoint).named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(source[name])

    def logprobs(ids: Tensor, targets: Tensor) -> Tensor:
        batch, length = ids.shape
        positions = torch.arange(length, device=device).repeat(batch)
        bounds = torch.arange(batch + 1, device=device, dtype=torch.int32) * length
        rows = model(ids.flatten(), positions, bounds, length, targets.flatten())
        return rows.view(batch, length)

    return "plain torch, compiled: cuBLAS, varlen flash attention", model, logprobs


def head_logprobs(x: Tensor, norm: Tensor, head: Tensor, targets: Tensor, eps: float) -> Tensor:
    """Final norm, logits, logprobs of the targets in fp32: x [T, H] -> [T]."""
    return token_logprobs(F.rms_norm(x, (x.shape[1],), norm, eps), head, targets)


def token_logprobs(x: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """x [T, H] after the final norm -> [T] fp32."""
    return -F.cross_entropy(F.linear(x, head).float(), targets, reduction="none")


def transformers_model(checkpoint: Path, device: str) -> tuple[str, nn.Module, Logprobs]:
    """transformers' model, made on the device."""
    import transformers

    from isomodels.parity.stock import load_transformers

    spec, config = read_config(checkpoint)
    with torch.device(device):
        model = load_transformers(checkpoint, config.torch_dtype).train()
    head, extras = token_logprobs, ""
    if device == "cuda":
        if spec.family == "hybrid":
            extras = f", {fast_linear_attention(model)}"
        if compiles(device):
            head, extras = torch.compile(head), f"{extras}, norms and head compiled"
            for module in model.modules():
                if type(module).__name__.endswith("RMSNorm"):
                    module.compile()

    def logprobs(ids: Tensor, targets: Tensor) -> Tensor:
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        rows = head(hidden.flatten(0, 1), model.lm_head.weight, targets.flatten())
        return rows.view(ids.shape)

    chosen = model.config._attn_implementation, model.config._experts_implementation
    name = f"transformers {transformers.__version__} ({', '.join(map(str, chosen))}{extras})"
    return name, model, logprobs


def fast_linear_attention(model: nn.Module) -> str:
    """Sees to it that delta rule and convolution are not transformers' slow ones."""
    package = importlib.import_module("fla")
    importlib.import_module("fla.ops.gated_delta_rule")  # else transformers would do without
    modeling: Any = sys.modules[type(model).__module__]
    if compiles("cuda"):
        modeling.causal_conv1d_fn = torch.compile(causal_conv)
    fewer_configurations(CONFIGURATIONS)
    version = package.__version__
    return f"flash-linear-attention {version} tuned among {CONFIGURATIONS} forms of each kernel"


def fewer_configurations(most: int) -> int:
    """Leave each autotuned kernel of flash-linear-attention so many: all of them take minutes.

    Returns:
        How many kernels had more.
    """
    cut = 0
    for name, module in list(sys.modules.items()):
        for kernel in vars(module).values() if name.startswith("fla.") else ():
            while kernel is not None and not hasattr(kernel, "configs"):
                kernel = vars(kernel).get("fn") if hasattr(kernel, "__dict__") else None
            if kernel is not None and len(kernel.configs) > most:
                kernel.configs = kernel.configs[:: -(-len(kernel.configs) // most)]
                cut += 1
    return cut


def compiles(device: str) -> bool:
    """Whether torch.compile works beside this Triton, which need not be torch's own."""
    try:
        return bool(torch.compile(lambda x: x.float() * 2)(torch.ones(8, device=device))[0] == 2)
    except Exception as error:  # whatever an unknown pair of versions raises
        print(f"not compiled: {error}")
        return False


def causal_conv(x: Tensor, weight: Tensor, bias: None, activation: str, **_: Any) -> Tensor:
    """Depthwise causal convolution and SiLU: x [B, D, T], weight [D, W] -> [B, D, T]."""
    length, width = x.shape[2], weight.shape[1]
    padded = F.pad(x.transpose(1, 2), (0, 0, width - 1, 0))  # [B, W - 1 + T, D]
    taps = [padded[:, k : k + length] * weight[:, k] for k in range(width)]
    return F.silu(sum(taps)).transpose(1, 2)  # type: ignore[arg-type]
