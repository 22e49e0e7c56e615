"""How long a lane's next step should take, from what its steps took before."""


class StepRates:
    """Measured step durations by step size, in size classes that are powers of two.

    A step costs neither a fixed time nor a fixed time per token: decode steps are bound by reading the weights,
    prefill chunks by arithmetic. A size class that has been measured is predicted by its own average; a larger one,
    until it has been measured, by the rate per token of the largest class below it, which errs on the long side.
    """

    _NEWEST_WEIGHT = 0.3

    def __init__(self) -> None:
        self._mean_ms_by_class: dict[int, float] = {}
        self.last_step_ms = 0.0

    def record(self, num_tokens: int, step_ms: float) -> None:
        """Take in the duration of a step that computed `num_tokens`."""
        self.last_step_ms = step_ms
        size_class = num_tokens.bit_length()
        mean_ms = self._mean_ms_by_class.get(size_class, step_ms)
        self._mean_ms_by_class[size_class] = mean_ms + self._NEWEST_WEIGHT * (step_ms - mean_ms)

    def predict_ms(self, num_tokens: int) -> float | None:
        """Return the expected duration of a step of `num_tokens`; None before the first record."""
        if not self._mean_ms_by_class:
            return None
        size_class = num_tokens.bit_length()
        below = [measured for measured in self._mean_ms_by_class if measured <= size_class]
        if not below:
            return self._mean_ms_by_class[min(self._mean_ms_by_class)]
        nearest = max(below)
        return self._mean_ms_by_class[nearest] * float(2 ** (size_class - nearest))
