"""How one row's tokens are chosen: the wire's sampling parameters, checked, in the form that the sampler works with."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from protos import common_pb2 as pb


class InvalidSamplingError(ValueError):
    """A row's sampling parameters name tokens that the model does not have; the row cannot be computed."""


@dataclass(frozen=True, slots=True)
class RowSampling:
    """Sampling parameters of one row. Temperature 0 is greedy; filters and penalties are off at 0 or 1, as usual."""

    temperature: float
    top_k: int  # 0: off
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    min_tokens: int
    stop_ids: npt.NDArray[np.int64]  # never sampled before min_tokens
    bias_ids: npt.NDArray[np.int64]
    bias_values: npt.NDArray[np.float32]  # parallel to bias_ids
    num_logprobs: int | None

    @classmethod
    def from_message(cls, message: pb.SamplingParams, eos_token_ids: tuple[int, ...], vocab_size: int) -> "RowSampling":
        """Return the parameters of a message. Raises InvalidSamplingError where an id is not below `vocab_size`."""
        stops = {*message.stop_token_ids, *(() if message.ignore_eos else eos_token_ids)}
        bias_ids = np.array(message.logit_bias_token_ids, dtype=np.int64)
        if len(bias_ids) != len(message.logit_bias_values):
            raise InvalidSamplingError(f"{len(bias_ids)} logit-bias ids have {len(message.logit_bias_values)} values")
        for name, ids in (("stop_token_ids", message.stop_token_ids), ("logit_bias", bias_ids)):
            if len(ids) and max(ids) >= vocab_size:
                raise InvalidSamplingError(f"{name}: {max(ids)} is not below the vocabulary's {vocab_size} tokens")
        return cls(
            temperature=message.temperature,
            top_k=message.top_k,
            top_p=message.top_p,
            min_p=message.min_p,
            repetition_penalty=message.repetition_penalty,
            presence_penalty=message.presence_penalty,
            frequency_penalty=message.frequency_penalty,
            seed=message.seed,
            min_tokens=message.min_tokens,
            stop_ids=np.array(sorted(stops), dtype=np.int64),
            bias_ids=bias_ids,
            bias_values=np.array(message.logit_bias_values, dtype=np.float32),
            num_logprobs=message.num_logprobs if message.HasField("num_logprobs") else None,
        )

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature <= 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether tokens that the row has already change its logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def is_plain(self) -> bool:
        """Whether the token is simply the most likely one at every position, and nothing else is asked for."""
        return (
            self.is_greedy
            and not self.has_penalties
            and not len(self.bias_ids)
            and self.min_tokens == 0
            and self.num_logprobs is None
        )
