"""How the server is: `/health`, `/live`, `/ping`, `/version`, `/load`."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

import vtoken
from vtoken.server.errors import unavailable
from vtoken.server.openapi import answers
from vtoken.server.protocol.common import Health, Load, Version
from vtoken.server.state import state_of

router = APIRouter(tags=["operation"])


@router.get("/health", **answers(Health, 405, 503))
@router.get("/ping", **answers(Health, 405, 503))
@router.post("/ping", **answers(Health, 405, 503))
async def health(request: Request) -> Response:
    """503 if the engine has died, or hangs in a step, or the server shuts down: no requests should come here."""
    state = state_of(request)
    state.check_ready()
    if state.is_draining:
        raise unavailable("the server is shutting down")
    age = state.llm.last_step_age
    if age > state.settings.stuck_after:
        raise unavailable(f"the engine is stuck: no step has ended for {age:.0f} seconds, though there is work")
    return _as_json(Health())


@router.get("/live", **answers(Health, 405))
async def live() -> Response:
    """That this process answers at all."""
    return _as_json(Health())


@router.get("/version", **answers(Version, 401, 405))
async def version() -> Response:
    return _as_json(Version(version=vtoken.__version__))


@router.get("/load", **answers(Load, 401, 405))
async def load(request: Request) -> Response:
    """How many requests are being answered."""
    state = state_of(request)
    return _as_json(Load(server_load=state.num_open, queued=state.llm.num_queued))


def _as_json(model: Health | Version | Load) -> Response:
    return Response(model.model_dump_json(), media_type="application/json")
