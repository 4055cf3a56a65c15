"""Responses that several routes give."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None = Field(description="The field at fault.")
    code: str | None = Field(description="A word for programs.")


class ErrorResponse(BaseModel):
    error: ErrorDetail


class PromptTokensDetails(BaseModel):
    cached_tokens: int = Field(description="Tokens found in the prefix cache, so never computed for this request.")


class Usage(BaseModel):
    """Tokens of a request. `kept_tokens` and `evicted_tokens` are vtoken's: of the texts of all choices, each with its
    prompt, how many were still in memory at the end, and how many were evicted."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    kept_tokens: int
    evicted_tokens: int


class ScoredToken(BaseModel):
    """One of `prompt_logprobs`, by token id."""

    logprob: float
    rank: int
    decoded_token: str | None


PromptLogprobs = list[dict[str, ScoredToken] | None]


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "vtoken"
    root: str = Field(description="The model as it was given at start, without its folder.")
    parent: str | None = None
    max_model_len: int = Field(description="The most tokens of a sequence, prompt and answer together.")


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


class Health(BaseModel):
    model_config = ConfigDict(extra="forbid")

    status: Literal["ok"] = "ok"


class Version(BaseModel):
    version: str


class Load(BaseModel):
    server_load: int = Field(description="Requests that are being answered, or wait.")
    queued: int = Field(description="Choices among them that have not run yet.")
