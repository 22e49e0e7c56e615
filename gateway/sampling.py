"""From a client's sampling fields to the wire's: defaults filled in, token ids checked against the model."""

import secrets
from collections.abc import Iterable

from gateway.errors import InvalidRequestError
from gateway.schemas import GenerateRequest
from protos import common_pb2

_UINT64_MASK = 2**64 - 1


def sampling_params(request: GenerateRequest, vocab_size: int, room_tokens: int) -> common_pb2.SamplingParams:
    """Return the wire's sampling parameters for a request whose prompt leaves room for `room_tokens` output tokens.

    Draws a seed when the client gives none. Raises InvalidRequestError for token ids outside the vocabulary.
    """
    check_token_ids(request.stop_token_ids, vocab_size, "stop_token_ids")
    check_token_ids(request.logit_bias, vocab_size, "logit_bias")
    limit = request.output_limit
    max_tokens = room_tokens if limit is None else min(limit, room_tokens)
    return common_pb2.SamplingParams(
        temperature=request.temperature,
        top_k=max(request.top_k, 0),
        top_p=request.top_p,
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        # A negative seed is as good as any: its 64 bits count.
        seed=secrets.randbits(64) if request.seed is None else request.seed & _UINT64_MASK,
        max_tokens=max_tokens,
        min_tokens=min(request.min_tokens, max_tokens),
        ignore_eos=request.ignore_eos,
        stop_token_ids=request.stop_token_ids,
        logit_bias_token_ids=list(request.logit_bias),
        logit_bias_values=list(request.logit_bias.values()),
        num_logprobs=request.num_logprobs,
    )


def check_token_ids(token_ids: Iterable[int], vocab_size: int, param: str) -> None:
    """Raise InvalidRequestError, naming `param`, when an id is outside the vocabulary."""
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                f"`{param}`: token id {token_id} is outside the model's vocabulary of {vocab_size} tokens.", param
            )
