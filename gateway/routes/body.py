"""Reads the JSON body of a request, whatever content type the client names, and describes it in the API's schema."""

from typing import Any

from fastapi import Request
from pydantic import BaseModel

from gateway.answering import MAX_SUBMIT_BYTES
from gateway.errors import InvalidRequestError
from gateway.schemas import parse_object

# As much as may go to the scheduler. While a body is parsed and checked no stream gets a token, and a thread would hold
# the interpreter too. 16 MiB of text take 7 ms; the worst there is, 8 million tokens of one digit, a second.
MAX_BODY_BYTES = MAX_SUBMIT_BYTES


async def read_object(request: Request) -> dict[str, Any]:
    """Return the JSON object of the body. Raises InvalidRequestError, for a body that is too long too."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise InvalidRequestError(f"The request's body is longer than {MAX_BODY_BYTES} bytes.")
    return parse_object(bytes(body))


def described_by(request_class: type[BaseModel]) -> dict[str, Any]:
    """Return what a route says about its body in the OpenAPI schema."""
    return {"requestBody": {"content": {"application/json": {"schema": request_class.model_json_schema()}}}}
