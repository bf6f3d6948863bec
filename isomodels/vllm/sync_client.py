"""The calls of a weight sync on a `vllm.LLM` of this process (`isomodels.sync.SyncClient`).

For a server, vLLM has the same as `HTTPVLLMWeightSyncClient`.
"""

from typing import Any

from isomodels.contract import Contract, require_same


class LLMSyncClient:
    """Takes a weight sync into a `vllm.LLM`.

    Args:
        llm: started with `model_impl="isomodels"` and
            `weight_transfer_config={"backend": "isomodels"}`.
    """

    def __init__(self, llm: Any):
        self.llm = llm

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Compare contracts, here too: of an engine's own process vLLM brings no error's type.

        Raises:
            ContractError: the engine would not give the trainer's bits.
        """
        trainer = Contract.from_json(init_info["contract"], "the trainer's contract")
        for engine in set(self.llm.collective_rpc("isomodels_contract")):
            require_same(trainer, Contract.from_json(engine, "the engine's contract"))
        self.llm.init_weight_transfer_engine({"init_info": init_info})

    def shutdown_weight_transfer_engine(self) -> None:
        """Let go of the trainer."""
        self.llm.shutdown_weight_transfer_engine()

    def start_weight_update(self) -> None:
        """Begin."""
        self.llm.start_weight_update()

    def update_weights(self, update_info: Any) -> None:
        """Change the weights, check them, and name them."""
        self.llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End."""
        self.llm.finish_weight_update(weight_version)

    def weight_version(self) -> str:
        """Name of the weights that the engine serves; "default" before the first sync.

        vLLM labels with it the tokens of a request's final output, and so their logprobs
        (`CompletionOutput.weight_versions`). (Over HTTP: GET /get_weight_version.)
        """
        return str(self.llm.get_weight_version())
