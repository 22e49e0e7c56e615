"""`POST /v1/completions`."""

from collections.abc import Sequence

from fastapi import APIRouter, Request, Response

from gateway.answering import Gateway, PromptSource, respond
from gateway.reply import new_reply_id
from gateway.routes.body import described_by, read_object
from gateway.schemas import CompletionRequest, Prompt, check
from gateway.shapes import CompletionShape


def completions_router(gateway: Gateway) -> APIRouter:
    """Return the route of completions."""
    router = APIRouter()

    def text_of(prompt: Prompt, token_ids: list[int]) -> str:
        return prompt if isinstance(prompt, str) else gateway.prompts.tokenizer.decode(token_ids)

    @router.post("/v1/completions", openapi_extra=described_by(CompletionRequest))
    async def create_completion(request: Request) -> Response:
        """Continue one or more prompts."""
        body = check(CompletionRequest, await read_object(request))
        tenant = gateway.tenants.of(request.headers, body.user)

        async def tokenize() -> list[list[int]]:
            limits, of_completion = gateway.limits, gateway.prompts.of_completion
            return [await of_completion(prompt, body.add_special_tokens, limits) for prompt in body.prompt]

        reply_id = new_reply_id("cmpl")

        def make_shape(prompts: Sequence[list[int]]) -> CompletionShape:
            texts = map(text_of, body.prompt, prompts) if body.echo else ()
            echoes = [text for text in texts for _ in range(body.n)]
            tokenizer = gateway.prompts.tokenizer
            return CompletionShape(reply_id, gateway.model_name, tokenizer, body.include_usage, echoes)

        return await respond(
            gateway, body, tenant, reply_id, PromptSource("prompt", len(body.prompt), tokenize), make_shape
        )

    return router
