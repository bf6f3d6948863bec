"""`GET /isomodels/contract` on vLLM's API server: the contract of the engine behind it.

vLLM loads such plug-ins only where `VLLM_PLUGINS` names them: `VLLM_PLUGINS=isomodels vllm serve`.
(Its versions before 0.32 have none: there, and without the name, the contract is an answer of
`POST /collective_rpc` under VLLM_SERVER_DEV_MODE=1.)
"""

from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from isomodels.vllm.plugin import MODEL_IMPL

CONTRACT_PATH = "/isomodels/contract"


class ContractRoute:
    """Entry point of the group `vllm.endpoint_plugins`."""

    name = "isomodels"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the route."""
        app.add_api_route(CONTRACT_PATH, contract, methods=["GET"])

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Nothing: the server keeps its engine where the route finds it."""


async def contract(request: Request) -> Response:
    """The contract as canonical JSON; 404 where another model class serves.

    `isomodels contract diff` reads what is saved of it.
    """
    engine = request.app.state.engine_client
    if engine.vllm_config.model_config.model_impl != MODEL_IMPL:
        return _refused(404, "this server was started without --model-impl isomodels")
    found = set(await engine.collective_rpc("isomodels_contract"))
    if len(found) != 1:
        return _refused(500, f"the workers have {len(found)} contracts: start the engine anew")
    return Response(found.pop(), media_type="application/json")


def _refused(status: int, why: str) -> Response:
    return JSONResponse({"error": {"message": f"isomodels: {why}", "code": status}}, status)
