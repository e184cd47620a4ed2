"""Recorded forwards: the same bits as the forward, of the weights as they are now, or a refusal that says why."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from rl_generation import Sampling, TransformersEngine
from rl_generation.embedded.recorded_forward import USES_BEFORE, NotRecordableError, RecordedDecoding, record

PROMPTS = [[1, 5, 6], [1, 7], [3, 4, 5, 6, 7, 8], [9]]
SAMPLING = Sampling(max_new_tokens=30, seed=3, n=2)
RECORDED = ["gemma2", "gemma3", "llama", "mistral", "phi3", "qwen2", "qwen3"]
# Of `generate` with these, until the shapes that they often take have been recorded and compared.
CALLS = 5


def engine(model, **options):
    return TransformersEngine(model, **{"stop_token_ids": [2], "pad_token_id": 0, **options})


def decoding(served) -> RecordedDecoding:
    return served._runner._model.decoding


def tokens_and_logp(served, *, times=1):
    answers = [served.generate(PROMPTS, SAMPLING) for _ in range(times)]
    return [(rollout.tokens, rollout.logp) for rollouts in answers for rollout in rollouts]


@pytest.mark.parametrize("family", RECORDED)
def test_what_is_replayed_has_the_very_bits_of_the_forward(tiny, family):
    replaying, plain = engine(tiny(family)), engine(tiny(family), record_decoding=False)
    assert tokens_and_logp(replaying, times=CALLS) == tokens_and_logp(plain, times=CALLS)
    assert decoding(replaying).num_replayed > 0
    assert "shapes so far" in replaying.explain()
    assert "not recorded: record_decoding=False" in plain.explain()


def test_a_replay_runs_none_of_the_models_python(tiny, monkeypatch):
    served, forwards = engine(tiny("llama")), []
    plain, sampling = served.model.forward, Sampling(max_new_tokens=28, n=4, ignore_eos=True, seed=0)
    monkeypatch.setattr(served.model, "forward", lambda *args, **kwargs: forwards.append(0) or plain(*args, **kwargs))
    for _ in range(2):
        served.generate([[1, 5, 6]], sampling)
    assert 1 + USES_BEFORE <= len(forwards) < 2 * 28
    forwards.clear()
    served.generate([[1, 5, 6]], sampling)
    assert len(forwards) == 1, "that of the prompt"


def test_new_weights_in_place_are_the_ones_that_a_replay_reads(tiny):
    served, newer = engine(tiny("qwen3")), tiny("qwen3", seed=1)
    tokens_and_logp(served, times=CALLS)
    replayed = decoding(served).num_replayed
    with torch.no_grad():
        for mine, theirs in zip(served.model.parameters(), newer.parameters(), strict=True):
            mine.copy_(theirs)
    served.commit_version(1)
    assert tokens_and_logp(served) == tokens_and_logp(engine(newer, record_decoding=False))
    assert decoding(served).num_replayed >= replayed > 0


def test_other_parameters_in_place_of_the_old_ones_are_noticed(tiny):
    served, newer = engine(tiny("llama")), tiny("llama", seed=1)
    tokens_and_logp(served, times=CALLS)
    served.model.load_state_dict(newer.state_dict(), assign=True)
    served.commit_version(1)
    assert tokens_and_logp(served) == tokens_and_logp(engine(newer, record_decoding=False))


def test_a_larger_cache_does_not_invalidate_what_was_recorded(tiny):
    served, plain = engine(tiny("llama")), engine(tiny("llama"), record_decoding=False)
    tokens_and_logp(served, times=CALLS)
    long = Sampling(max_new_tokens=50, seed=0, ignore_eos=True)
    for each in (served, plain):
        each.generate([[1, index] for index in range(12)], long)
        each.close()
    assert tokens_and_logp(served) == tokens_and_logp(plain)


def test_hooks_of_the_model_are_called_at_every_step(tiny):
    served, seen = engine(tiny("llama")), []
    tokens_and_logp(served, times=CALLS)
    hook = served.model.model.layers[0].register_forward_hook(lambda *_: seen.append(0))
    rollouts = served.generate([[1, 5]], Sampling(max_new_tokens=9, seed=0, ignore_eos=True))
    assert len(seen) == len(rollouts[0].tokens) == 9
    assert "since it has hooks" in served.explain()
    hook.remove()
    assert "shapes so far" in served.explain()


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("gpt2", "not recorded: the shape of a result depends on values (torch.Tensor.__getitem__)"),
        ("llama_longrope", "not recorded: it"),  # by release: its own frequencies, or other buffers each time
        ("qwen3_moe", "not recorded: "),  # by release: shapes that depend on values, or an index that is one
    ],
)
def test_a_model_whose_python_depends_on_values_runs_as_it_is_and_says_so(tiny, family, reason):
    served, plain = engine(tiny(family)), engine(tiny(family), record_decoding=False)
    assert tokens_and_logp(served, times=CALLS) == tokens_and_logp(plain, times=CALLS)
    for _ in range(3):  # all past the original length, for a release that keeps its frequencies as long as they hold
        served.generate([[1] * 17], Sampling(max_new_tokens=40, seed=0, ignore_eos=True))
    assert decoding(served).num_replayed == 0
    assert reason in served.explain()


class Switched(nn.Linear):
    """As an adapter is: turned off by a flag."""

    on = True

    def forward(self, given):
        """Twice the features while it is on."""
        return super().forward(given) * (2.0 if self.on else 1.0)


def test_modules_of_others_run_as_they_are_since_a_replay_would_not_see_their_flags(tiny):
    model = tiny("llama")
    model.lm_head.__class__ = Switched
    served = engine(model)
    before = tokens_and_logp(served, times=CALLS)
    assert "Switched is no module of torch or transformers" in served.explain()
    model.lm_head.on = False
    assert tokens_and_logp(served) == tokens_and_logp(engine(tiny("llama"), record_decoding=False)) != before


def test_broken_weights_teach_nothing(tiny):
    model = tiny("llama")
    served, good = engine(model), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.nan)
    for _ in range(2 * USES_BEFORE):
        with pytest.raises(ValueError, match="NaN"):
            served.generate(PROMPTS, SAMPLING)
    assert decoding(served).why_not is None
    model.load_state_dict(good)
    assert tokens_and_logp(served, times=CALLS) == tokens_and_logp(
        engine(tiny("llama"), record_decoding=False), times=CALLS
    )


# -- the recorder itself


def test_a_recording_repeats_calls_of_every_form():
    weight, kept = torch.randn(4, 4), torch.zeros(3, 4)

    def forward(x, y):
        x = x.float().contiguous()  # which does nothing to it
        first, second = torch.cat([x, y], dim=-1).chunk(2, -1)
        largest = (first @ weight.mT).max(dim=-1, keepdim=True)
        kept[:, 1:3] = second[:, 1:3]
        kept.add_(1)
        scores = torch.where(x > -torch.inf, 1 - x, -x)[..., None].expand((*x.shape, 2)).sum(-1) + largest.values
        left, right = F.silu(scores, inplace=True).split([1, 3], dim=-1)
        return torch.cat([left, right], dim=-1).flip(-1).to(torch.float64) * 2.0 + kept + torch.arange(x.shape[1])

    shapes = [(torch.randn(3, 4), torch.randn(3, 4)) for _ in range(2)]
    replay = record(forward, shapes[0], live=[weight, kept])
    weight.mul_(2)
    for inputs in shapes:
        kept.zero_()
        expected, left = forward(*inputs), kept.clone()
        kept.zero_()
        assert torch.equal(replay(*inputs), expected)
        assert torch.equal(kept, left)


OUTSIDE = torch.ones(2)


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (lambda x: x * x.max().item(), r"the value of a tensor \(torch.Tensor.item\)"),
        (lambda x: -x if x.sum() > 0 else x, r"the value of a tensor \(torch.Tensor.__bool__\)"),
        (lambda x: x * float(x[0]), "the value of a tensor"),
        (lambda x: x + len(x.tolist()), "the value of a tensor"),
        (lambda x: x[x > 0].sum() + x, "the shape of a result depends on values"),
        (lambda x: x + x.nonzero().sum(), "the shape of a result depends on values"),
        (lambda x: x + OUTSIDE, "no parameter, buffer or input"),
        (lambda x: torch.cat((x, OUTSIDE)), "no parameter, buffer or input"),
    ],
)
def test_what_cannot_be_repeated_is_refused_by_name(forward, reason):
    with pytest.raises(NotRecordableError, match=reason):
        record(forward, [torch.randn(2)], live=[])


class Counting(nn.Module):
    """Decides by how often it was called, which no recording sees."""

    def __init__(self, *, turns_at):
        super().__init__()
        self.calls, self.turns_at = 0, turns_at

    def forward(self, x):
        self.calls += 1
        return x * 2 if self.calls > self.turns_at else x


def test_a_recording_that_differs_on_the_next_step_is_not_used():
    module = Counting(turns_at=USES_BEFORE + 2)
    decoded = RecordedDecoding(module)
    x = torch.ones(2)
    results = [decoded((2,), module, [x]) for _ in range(2 * USES_BEFORE)]
    assert [int(each[0]) for each in results] == [1 if use < USES_BEFORE + 1 else 2 for use in range(2 * USES_BEFORE)]
    assert "did not give the same logits" in decoded.explain()


def test_only_so_many_recordings_are_kept(monkeypatch):
    monkeypatch.setattr("rl_generation.embedded.recorded_forward.MAX_RECORDINGS", 3)
    module = nn.Linear(2, 2)
    decoded = RecordedDecoding(module)
    with torch.no_grad():
        for rows in range(1, 6):
            for _ in range(2 * USES_BEFORE):
                decoded((rows,), module, [torch.ones(rows, 2)])
    assert decoded.num_replayed == 3
