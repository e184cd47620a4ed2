import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_generation.rollout import Rollout, VersionSpan, in_order


def rollout(tokens=(5, 6, 7), logp=(-1.0, -2.0, -3.0), versions=((4, 0, 3),), **others):
    spans = tuple(VersionSpan(version=version, start=start, end=end) for version, start, end in versions)
    settings = {"finish_reason": "length", "stop_reason": None, "logp_of": "sampled"}
    return Rollout(tokens=tokens, logp=logp, versions=spans, **(settings | others))


@pytest.mark.parametrize("logp", [(-1.0, -2.0), (-1.0, -2.0, float("nan")), (-1.0, -2.0, -float("inf")), ()])
def test_a_token_without_a_finite_logp_is_refused(logp):
    with pytest.raises(ValueError, match=rf"sample 2 of prompt 1 has 3 tokens and {len(logp)} logp, of which"):
        rollout(logp=logp, prompt_index=1, sample_index=2)


@pytest.mark.parametrize(
    "versions", [(), ((4, 0, 2),), ((4, 1, 3),), ((4, 0, 1), (5, 2, 3)), ((4, 0, 2), (5, 1, 3)), ((4, 0, 4),)]
)
def test_versions_that_leave_a_gap_are_refused(versions):
    with pytest.raises(ValueError, match=r"has 3 tokens, which versions=.* must cover from first to last"):
        rollout(versions=versions)


def test_the_version_of_an_answer_is_that_of_its_oldest_weights():
    assert rollout(versions=((7, 0, 1), (9, 1, 3))).version == 7
    assert rollout(versions=((9, 0, 1), (7, 1, 3))).version == 7  # a rollback
    assert rollout(tokens=(), logp=(), versions=((9, 0, 0),), finish_reason="abort").version == 9


def test_only_an_answer_that_the_model_ended_is_whole():
    assert [rollout(finish_reason=reason).truncated for reason in ("stop", "length", "abort")] == [False, True, True]


@settings(deadline=None)
@given(st.permutations([(prompt, sample) for prompt in range(4) for sample in range(3)]))
def test_rollouts_are_ordered_by_prompt_and_then_by_sample(places):
    shuffled = [rollout(prompt_index=prompt, sample_index=sample) for prompt, sample in places]
    assert [(each.prompt_index, each.sample_index) for each in in_order(shuffled)] == sorted(places)
