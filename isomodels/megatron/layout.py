"""Which part of a model a rank of Megatron holds: degrees of parallelism and process groups."""

import re
from dataclasses import dataclass
from typing import Any

from torch import nn

from isomodels.errors import UnsupportedError
from isomodels.layers.parallel import (
    ExpertParallel,
    Layout,
    Stage,
    TensorParallel,
    check_layout,
    shards,
)

_WORD = re.compile(r"(tp|pp|vpp|ep|dp)([1-9][0-9]*)")


@dataclass(frozen=True)
class Degrees:
    """How many ranks share what; the text form is "tp2,sp,pp2,vpp2,ep2,dp2" in any order.

    Attributes:
        tp: ranks that share each layer.
        sp: whether the residual stream is cut among them (sequence parallelism).
        pp: pipeline stages.
        vpp: virtual stages of each of them.
        ep: ranks that share the experts; they are ranks of `tp` and `dp`.
        dp: ranks that train on other sequences.
    """

    tp: int = 1
    sp: bool = False
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    dp: int = 1

    @property
    def ranks(self) -> int:
        """Processes in all."""
        return self.tp * self.pp * self.dp

    @classmethod
    def parse(cls, text: str) -> "Degrees":
        """Read the text form.

        Raises:
            UnsupportedError: naming the word that is none, or a combination that is none.
        """
        found: dict[str, Any] = {}
        for word in text.split(","):
            name: str = "sp"
            count: int | bool = True
            if word != "sp":
                match = _WORD.fullmatch(word)
                if match is None:
                    raise UnsupportedError(
                        f"layout {text!r}: {word!r} is none of tpN, sp, ppN, vppN, epN, dpN"
                    )
                name, count = match[1], int(match[2])
            if name in found:
                raise UnsupportedError(f"layout {text!r} states {name} twice")
            found[name] = count
        degrees = cls(**found)
        degrees.check()
        return degrees

    def check(self) -> None:
        """Refuse degrees that do not go together.

        Raises:
            UnsupportedError: one sentence.
        """
        if self.sp and self.tp == 1:
            raise UnsupportedError(
                "sequence parallelism cuts among tensor parallel ranks: give tpN"
            )
        if self.vpp > 1 and self.pp == 1:
            raise UnsupportedError("virtual stages are of pipeline stages: give ppN")
        shared = self.tp * self.dp
        if shared % self.ep:
            fitting = ", ".join(str(n) for n in range(1, shared + 1) if shared % n == 0)
            raise UnsupportedError(
                f"ep{self.ep}: experts are shared among the {shared} ranks of tp and dp: "
                f"use one of {fitting}"
            )

    def check_model(self, config: Any) -> None:
        """Refuse degrees that do not divide a model.

        Args:
            config: the architecture's config.

        Raises:
            UnsupportedError: naming those that do.
        """
        experts = ExpertParallel(size=self.ep)
        check_layout(config, Layout(TensorParallel(size=self.tp), experts))
        num_layers = config.num_hidden_layers
        if num_layers % (self.pp * self.vpp):
            fitting = ", ".join(str(n) for n in range(1, num_layers + 1) if num_layers % n == 0)
            raise UnsupportedError(
                f"{self.pp} pipeline stages of {self.vpp} virtual ones do not divide the "
                f"{num_layers} layers: use as many in all as one of {fitting}"
            )

    def __str__(self) -> str:
        words = [f"{n}{getattr(self, n)}" for n in ("tp", "pp", "vpp", "ep", "dp")]
        words = [word for word in words if not word.endswith("p1")]
        return ",".join([*words, *(["sp"] if self.sp else [])]) or "tp1"

    def overrides(self) -> dict[str, Any]:
        """Fields of `TransformerConfig`."""
        fields: dict[str, Any] = {
            "tensor_model_parallel_size": self.tp,
            "sequence_parallel": self.sp,
            "expert_model_parallel_size": self.ep,
            "expert_tensor_parallel_size": 1,
            "pipeline_model_parallel_size": self.pp,
        }
        if self.pp > 1:
            # Microbatches are of different lengths. Megatron's own dispatcher does not run.
            fields |= {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"}
        if self.vpp > 1:
            fields |= {
                "virtual_pipeline_model_parallel_size": self.vpp,
                "overlap_p2p_comm": True,
                "batch_p2p_comm": False,
            }
        return fields


def check_degrees(config: Any, hf_config: Any) -> None:
    """Refuse degrees of a `TransformerConfig` that do not divide the model.

    Raises:
        UnsupportedError: naming those that do.
    """
    Degrees(
        tp=config.tensor_model_parallel_size,
        pp=config.pipeline_model_parallel_size,
        vpp=config.virtual_pipeline_model_parallel_size or 1,
        ep=config.expert_model_parallel_size,
    ).check_model(hf_config)


def layout_of(config: Any, groups: Any, num_layers: int, vp_stage: int | None) -> Layout:
    """What this rank holds.

    Args:
        config: Megatron's `TransformerConfig`.
        groups: its process groups (`pg_collection`).
        num_layers: of the whole model.
        vp_stage: which virtual stage, or None.

    Raises:
        UnsupportedError: for process groups of other sizes than the config's.
    """
    for name, size in (
        ("tp", config.tensor_model_parallel_size),
        ("pp", config.pipeline_model_parallel_size),
        ("ep", config.expert_model_parallel_size),
        ("cp", 1),
    ):
        group = getattr(groups, name)
        ranks = 1 if group is None else group.size()
        if ranks != size:
            raise UnsupportedError(
                f"the process group {name} has {ranks} ranks, TransformerConfig asks for {size}: "
                "initialise Megatron with the sizes of the config"
            )
    tensor, experts = TensorParallel(), ExpertParallel()
    if groups.tp is not None and groups.tp.size() > 1:
        ranks = (groups.tp.rank(), groups.tp.size(), groups.tp)
        tensor = TensorParallel(*ranks, sequence=config.sequence_parallel)
    if groups.ep is not None and groups.ep.size() > 1:
        experts = ExpertParallel(groups.ep.rank(), groups.ep.size(), groups.ep)
    return Layout(tensor, experts, _stage(config, groups, num_layers, vp_stage))


def _stage(config: Any, groups: Any, num_layers: int, vp_stage: int | None) -> Stage:
    stages = 1 if groups.pp is None else groups.pp.size()
    if stages == 1:
        if vp_stage is not None:
            raise UnsupportedError(f"vp_stage={vp_stage} is of pipeline stages, and there is one")
        return Stage()
    virtual = config.virtual_pipeline_model_parallel_size or 1
    chunks = stages * virtual
    # virtual stage v of stage p comes after those of v - 1 of all stages
    number = (vp_stage or 0) * stages + groups.pp.rank()
    layers = num_layers // chunks
    first = number * layers
    return Stage(first, first + layers, embeds=number == 0, heads=number == chunks - 1)


def mark_parameters(core: nn.Module, layout: Layout) -> None:
    """Tell Megatron what is cut, what is replicated, and whose gradients it must add.

    Norms of the residual stream see a rank's slice of the tokens under sequence parallelism:
    Megatron adds their gradients in one message for the whole model.
    """
    from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes

    parts = shards(core)
    for name, parameter in core.named_parameters():
        # Experts have gradients of other tokens on every tensor parallel rank.
        if layout.tensor.size > 1 and ".experts." in name:
            set_tensor_model_parallel_attributes(parameter, True, 0, 1)
        elif layout.tensor.size > 1 and name in parts:
            set_tensor_model_parallel_attributes(parameter, True, parts[name].dim, 1)
        if layout.tensor.sequence and _on_slices(name):
            parameter.sequence_parallel = True  # type: ignore[attr-defined]


def _on_slices(name: str) -> bool:
    norms = ("input_layernorm.weight", "post_attention_layernorm.weight")
    return name.endswith(norms) or name == "model.norm.weight"
