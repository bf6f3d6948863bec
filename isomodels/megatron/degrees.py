"""Degrees of parallelism and their text form. Imports no torch: a command checks them at once."""

import re
from dataclasses import dataclass
from typing import Any

from isomodels.errors import UnsupportedError

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
        from isomodels.layers.parallel import (
            ExpertParallel,
            Layout,
            TensorParallel,
            check_layout,
        )

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
