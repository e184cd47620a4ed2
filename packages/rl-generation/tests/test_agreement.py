import math

import pytest

from rl_generation.verify import AgreementError, AgreementMonitor, LogpAgreement, TokenDifference


def agreement(*pairs):
    return LogpAgreement(
        differences=tuple(
            TokenDifference(prompt_index=0, sample_index=0, step=step, token=7, engine_logp=engine, model_logp=model)
            for step, (engine, model) in enumerate(pairs)
        )
    )


def test_the_figures_are_those_of_the_definition():
    compared = agreement((-1.0, -1.5), (-2.0, -2.0), (-3.0, -2.75), (-1.0, -math.inf))
    assert compared.tokens == 3
    assert compared.outside_support == 1
    assert compared.max_abs_difference == 0.5
    assert compared.mean_abs_difference == 0.25
    assert compared.token_mult_prob_error == pytest.approx((math.exp(0.5) + 1 + math.exp(0.25)) / 3)
    assert [each.step for each in compared.worst(3)] == [3, 0, 2]


def test_the_report_names_the_worst_tokens():
    lines = agreement((-1.0, -1.5), (-2.0, -2.0)).explain(1).splitlines()
    assert lines[0].startswith("2 tokens compared: token_mult_prob_error 1.324361, |difference| at most 5.0e-01")
    assert lines[2].split() == ["0", "0", "0", "7", "-1.000000", "-1.500000", "5.00e-01"]
    assert len(lines) == 3


def test_a_monitor_compares_at_the_start_and_every_so_many_steps():
    made = []
    monitor = AgreementMonitor(lambda: made.append(1) or agreement((-1.0, -1.0)), every=10)
    compared = [step for step in (3, 4, 12, 13, 14, 23, 40) if monitor(step) is not None]
    assert compared == [3, 13, 23, 40]
    assert len(made) == 4


def test_without_a_period_only_the_start_is_compared():
    monitor = AgreementMonitor(lambda: agreement((-1.0, -1.0)))
    assert [step for step in range(100) if monitor(step) is not None] == [0]


@pytest.mark.parametrize("pairs", [[(-1.0, -1.2)], [(-1.0, -1.0), (-1.0, -math.inf), (-1.0, -math.inf)]])
def test_a_monitor_stops_a_run_whose_engine_disagrees(pairs):
    with pytest.raises(AgreementError, match=r"(?s)at step 7 .*prompt +sample"):
        AgreementMonitor(lambda: agreement(*pairs))(7)
    assert AgreementMonitor(lambda: agreement((-1.0, -1.2)), max_token_mult_prob_error=1.3)(7) is not None


@pytest.mark.parametrize("pair", [(-1.0, -900.0), (math.nan, -1.0)])
def test_a_monitor_stops_at_differences_that_no_float_holds(pair):
    with pytest.raises(AgreementError, match="at step 0"):
        AgreementMonitor(lambda: agreement(pair, (-1.0, -1.0)))(0)


def test_a_monitor_that_could_not_work_is_refused():
    with pytest.raises(ValueError, match="every=-1"):
        AgreementMonitor(agreement, every=-1)
    with pytest.raises(ValueError, match=r"max_token_mult_prob_error=0\.5"):
        AgreementMonitor(agreement, max_token_mult_prob_error=0.5)
