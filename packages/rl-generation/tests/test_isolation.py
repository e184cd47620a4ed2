"""What a request gives depends on the weights, its prompt and its Sampling alone: random companies, embedded engine."""

import functools
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given

from rl_generation import Sampling, TransformersEngine

sys.path.insert(0, str(Path(__file__).parent / "vllm" / "programs"))
pytest.register_assert_rewrite("companies")
import companies
import families
from companies import COMPANIES, LONGEST, SCHEDULES, STORY

SETUPS = {
    "wide": {},
    "narrow": {"max_batch_size": 3},
    "short of cache": {"max_batch_size": 5, "max_cache_tokens": LONGEST + 12},
    "whole batches": {"continuous_batching": "off"},
}


@functools.cache
def engine(setup):
    return TransformersEngine(
        families.reciting(),
        stop_token_ids=[families.EOS],
        pad_token_id=0,
        tokenizer=families.tokenizer(),
        **SETUPS[setup],
    )


def alone(prompt, sampling):
    return alone_cached(tuple(prompt), sampling)


@functools.cache
def alone_cached(prompt, sampling):
    return engine("wide").generate([prompt], [sampling])


@pytest.mark.parametrize(
    "setup",
    [each if each in {"narrow", "short of cache"} else pytest.param(each, marks=pytest.mark.slow) for each in SETUPS],
)
@companies.examples(12)
@given(company=COMPANIES)
def test_an_answer_is_what_its_request_gives_alone(setup, company):
    companies.check_company(engine(setup), company, alone)


@pytest.mark.parametrize("setup", [pytest.param("wide", marks=pytest.mark.slow), "narrow", "short of cache"])
@companies.examples(10)
@given(schedule=SCHEDULES)
def test_those_that_come_and_are_aborted_midway_change_nothing(setup, schedule):
    companies.check_schedule(engine(setup), schedule, alone)


def test_rows_that_gave_up_their_place_in_the_cache_go_on_as_if_they_had_not():
    served = engine("short of cache")
    before = served.metrics().preemptions
    long = Sampling(max_new_tokens=40, n=2, ignore_eos=True, stop=("P!Once upon a t",))
    company = [(STORY[:2], replace(long, seed=seed)) for seed in range(4)]
    companies.check_company(served, company, alone)
    assert served.metrics().preemptions > before
