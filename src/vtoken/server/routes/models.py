"""`GET /v1/models`: what is served."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from vtoken.server.openapi import answers
from vtoken.server.protocol.common import Model, ModelList
from vtoken.server.state import ServerState, state_of

router = APIRouter(tags=["models"])


@router.get("/v1/models", **answers(ModelList, 401, 405))
async def list_models(request: Request) -> Response:
    """The names that requests may give as `model`."""
    state = state_of(request)
    return _as_json(ModelList(data=[_model(state, name) for name in state.names]))


@router.get("/v1/models/{model:path}", **answers(Model, 401, 404, 405))
async def get_model(request: Request, model: str) -> Response:
    """One of them."""
    state = state_of(request)
    state.check_model(model)
    return _as_json(_model(state, model))


def _model(state: ServerState, name: str) -> Model:
    return Model(id=name, created=state.created, root=state.names[0], max_model_len=state.max_model_len)


def _as_json(model: Model | ModelList) -> Response:
    return Response(model.model_dump_json(), media_type="application/json")
