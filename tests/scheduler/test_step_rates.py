"""How long the next step should take."""

import pytest

from scheduler_svc.step_rates import StepRates


def test_nothing_is_predicted_before_the_first_step() -> None:
    assert StepRates().predict_ms(8) is None


def test_measured_size_is_predicted_by_its_own_steps() -> None:
    rates = StepRates()
    rates.record(8, 40.0)
    rates.record(512, 900.0)
    assert rates.predict_ms(8) == 40.0
    assert rates.predict_ms(512) == 900.0


def test_larger_size_is_predicted_by_the_rate_per_token() -> None:
    rates = StepRates()
    rates.record(8, 40.0)
    assert rates.predict_ms(512) == pytest.approx(40.0 * 64)


def test_smaller_size_is_predicted_no_shorter_than_the_nearest() -> None:
    rates = StepRates()
    rates.record(512, 900.0)
    assert rates.predict_ms(1) == 900.0


def test_prediction_follows_the_newest_steps() -> None:
    rates = StepRates()
    for step_ms in [10.0] * 5 + [100.0] * 20:
        rates.record(8, step_ms)
    assert rates.predict_ms(8) == pytest.approx(100.0, rel=0.01)
    assert rates.last_step_ms == 100.0
