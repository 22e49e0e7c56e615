"""Everything but generation: models, health, metrics, version, and the tokenizer by itself."""

import importlib.metadata
import time
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

from gateway.answering import Gateway
from gateway.errors import InvalidRequestError, UnavailableError, UnknownModelError
from gateway.routes.body import described_by, read_object
from gateway.sampling import check_token_ids
from gateway.schemas import MAX_SHOWN_TOKENS, DetokenizeRequest, TokenizeChatRequest, TokenizeRequest, check


def state_router(gateway: Gateway) -> APIRouter:
    """Return the routes that tell how the server is."""
    router = APIRouter()

    @router.get("/health")
    async def health() -> Response:
        """Say that the process lives, under any load."""
        return Response()

    @router.get("/ready")
    async def ready() -> Response:
        """Say whether a request would be served now."""
        if gateway.admission.is_draining:
            raise UnavailableError("The server is shutting down.")
        stats = await gateway.session.stats()
        if stats is None:
            raise UnavailableError("The scheduler is away.")
        if stats.draining:
            raise UnavailableError("The scheduler is shutting down.")
        if all(lane.draining for lane in stats.lanes) or gateway.session.cell is None:
            raise UnavailableError("No worker can serve.")
        return Response()

    @router.get("/metrics")
    async def metrics() -> Response:
        """Show the figures of this gateway and of the cell."""
        if gateway.session.cell is not None:
            gateway.metrics.for_model(gateway.model_name)
        return Response(gateway.metrics.render(await gateway.session.stats()), media_type=CONTENT_TYPE_LATEST)

    @router.get("/version")
    async def version() -> dict[str, str]:
        """Name the server's version."""
        return {"version": importlib.metadata.version("quire")}

    return router


def models_router(gateway: Gateway) -> APIRouter:
    """Return the routes that list the model."""
    router = APIRouter()
    created = int(time.time())

    def card() -> dict[str, Any]:
        name = gateway.model_name
        max_model_len = gateway.session.require_cell().model.max_model_len
        model = {"id": name, "object": "model", "created": created, "owned_by": "quire"}
        return model | {"root": name, "parent": None, "max_model_len": max_model_len}

    @router.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        """List the one model."""
        return {"object": "list", "data": [card()]}

    @router.get("/v1/models/{name:path}")
    async def retrieve_model(name: str) -> dict[str, Any]:
        """Describe a model."""
        if name != gateway.model_name:
            raise UnknownModelError(name)
        return card()

    return router


def tokenizer_router(gateway: Gateway) -> APIRouter:
    """Return vLLM's routes to the tokenizer."""
    router = APIRouter()
    prompts, tokenizer = gateway.prompts, gateway.prompts.tokenizer

    @router.post("/tokenize", openapi_extra=described_by(TokenizeRequest))
    async def tokenize(request: Request) -> JSONResponse:
        """Return the token ids of a text or a conversation."""
        fields = await read_object(request)
        body: TokenizeRequest | TokenizeChatRequest
        if "messages" in fields:
            body = chat = check(TokenizeChatRequest, fields)
            variables, limits = chat.chat_template_kwargs, gateway.limits
            token_ids = await prompts.of_chat(
                chat.messages, chat.add_generation_prompt, variables, limits, chat.add_special_tokens
            )
        else:
            body = check(TokenizeRequest, fields)
            token_ids = await prompts.of_completion(body.prompt, body.add_special_tokens, gateway.limits)
        gateway.check_model(body.model)
        if len(token_ids) > MAX_SHOWN_TOKENS:
            param = "messages" if "messages" in fields else "prompt"
            raise InvalidRequestError(f"The text has {len(token_ids)} tokens, {MAX_SHOWN_TOKENS} are the most.", param)
        strings = [tokenizer.token_string(token_id) for token_id in token_ids] if body.return_token_strs else None
        max_model_len = gateway.limits.max_model_len
        counts = {"count": len(token_ids), "max_model_len": max_model_len}
        return JSONResponse(counts | {"tokens": token_ids, "token_strs": strings})

    @router.post("/detokenize", openapi_extra=described_by(DetokenizeRequest))
    async def detokenize(request: Request) -> JSONResponse:
        """Return the text of token ids."""
        body = check(DetokenizeRequest, await read_object(request))
        gateway.check_model(body.model)
        check_token_ids(body.tokens, gateway.limits.vocab_size, "tokens")
        return JSONResponse({"prompt": tokenizer.decode(body.tokens)})

    return router
