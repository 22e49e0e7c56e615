"""`POST /v1/chat/completions`."""

from collections.abc import Sequence

from fastapi import APIRouter, Request, Response

from gateway.answering import Gateway, PromptSource, respond
from gateway.reply import new_reply_id
from gateway.routes.body import described_by, read_object
from gateway.schemas import ChatCompletionRequest, check
from gateway.shapes import ChatShape


def chat_router(gateway: Gateway) -> APIRouter:
    """Return the route of chat completions."""
    router = APIRouter()

    @router.post("/v1/chat/completions", openapi_extra=described_by(ChatCompletionRequest))
    async def create_chat_completion(request: Request) -> Response:
        """Answer a conversation."""
        body = check(ChatCompletionRequest, await read_object(request))
        tenant = gateway.tenants.of(request.headers, body.user)

        async def tokenize() -> list[list[int]]:
            return [
                await gateway.prompts.of_chat(
                    body.messages,
                    body.add_generation_prompt,
                    body.chat_template_kwargs,
                    gateway.limits,
                    body.add_special_tokens,
                )
            ]

        reply_id = new_reply_id("chatcmpl")

        def make_shape(_prompts: Sequence[list[int]]) -> ChatShape:
            return ChatShape(reply_id, gateway.model_name, gateway.prompts.tokenizer, body.include_usage)

        return await respond(gateway, body, tenant, reply_id, PromptSource("messages", 1, tokenize), make_shape)

    return router
