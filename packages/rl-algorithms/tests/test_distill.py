"""Claims about distillation: the student reaches its teacher, on its own answers and on given ones, however cut."""

import dataclasses
import functools
import itertools
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_algorithms import distill, policy_gradient, sft
from rl_algorithms.contracts import EnvironmentReturn, Student, Teacher
from rl_algorithms.distill import DistillConfig, NoReward, Rows
from rl_algorithms.distillation.self_distillation import of_rollouts
from rl_algorithms.objective import AdvantageConfig, Objective, RatioConfig, SelectionConfig
from rl_algorithms.rollouts import collect
from rl_algorithms.rows import DataError

LENGTH, VOCABULARY, MAX_NEW_TOKENS = 8, 6, 4


class Top(NamedTuple):
    logp: torch.Tensor
    token_ids: torch.Tensor


class TableTeacher:
    """A table of log-probabilities for each position; counts what it was asked."""

    def __init__(self, *, seed=3, scale=1.0):
        generator = torch.Generator().manual_seed(seed)
        logits = scale * torch.randn(LENGTH, VOCABULARY, generator=generator, dtype=torch.float64)
        self.log_p, self.asked = logits.log_softmax(-1), 0

    def topk_logits(self, examples, k):
        self.asked += 1
        top = self.log_p[: examples.tokens.shape[1]].expand(*examples.tokens.shape, -1).topk(k)
        mask = examples.trainable[..., None]
        return Top(torch.where(mask, top.values, 0.0), torch.where(mask, top.indices, 0))

    def logp(self, examples):
        log_p = self.log_p[torch.arange(examples.tokens.shape[1]), examples.tokens]
        return torch.where(examples.trainable, log_p, 0.0)


def make_rows(*, number=7, width=LENGTH, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(2, VOCABULARY, (number, width), generator=generator)
    lengths = torch.randint(2, width + 1, (number,), generator=generator)
    position = torch.arange(width)
    trainable = (position >= 1) & (position < lengths[:, None]) & (torch.rand(number, width, generator=generator) < 0.8)
    trainable[0, 1] = True
    return Rows(tokens=tokens, lengths=lengths, trainable=trainable)


def kl_to_teacher(table, teacher, positions):
    log_q = table.logits.detach().log_softmax(-1)
    return (log_q.exp() * (log_q - teacher.log_p)).sum(-1)[positions]


def gradient_of(table, examples, config):
    distill.step(table, examples, config)
    return table.grad


@pytest.fixture
def prompts(rows, chat):
    return itertools.repeat([chat.prompt(row) for row in rows])


def run(table, teacher, make_engine, prompts, chat, config, **options):
    engine = make_engine(table, seed=1)
    return list(
        distill.train(
            policy=table,
            teacher=teacher,
            engine=engine,
            weight_sync=engine,
            prompts=prompts,
            chat=chat,
            sampling=MAX_NEW_TOKENS,
            config=config,
            **options,
        )
    )


@pytest.mark.parametrize(
    "way",
    [
        {"beta": 0.0, "k": VOCABULARY},
        {"beta": 0.0},
        {"beta": 1.0},
        {"beta": 0.5},
        {"beta": 0.5, "interpolation": "mixed"},
    ],
)
def test_on_its_own_answers_the_student_reaches_its_teacher(make_table, make_engine, prompts, chat, way):
    """With 3 of 6 words too: at the optimum these and the tail agree."""
    table, teacher = make_table(lr=6.0), TableTeacher(scale=1.5)
    config = DistillConfig(max_num_steps=40, num_prompts=4, num_generations_per_prompt=4, **{"k": 3, **way})
    before = kl_to_teacher(table, teacher, slice(1, 3))
    metrics = run(table, teacher, make_engine, prompts, chat, config)
    top = teacher.log_p[1:3].topk(config.k)
    logp = table.logits.detach().log_softmax(-1)[1:3].gather(-1, top.indices)
    assert before.min() > 0.3
    assert (logp.exp() - top.values.exp()).abs().max() < 0.02
    assert metrics[-1]["loss"] < 0.02 * metrics[0]["loss"]
    assert [len(metrics), metrics[-1]["version"], teacher.asked] == [40, 40, 40]


def test_on_given_conversations_it_does_too(make_table):
    table, teacher = make_table(lr=4.0), TableTeacher()
    config = DistillConfig(max_num_steps=200, beta=0.0, k=VOCABULARY, steps_per_generation=2)
    metrics = list(
        distill.train_offline(policy=table, teacher=teacher, batches=itertools.repeat(make_rows()), config=config)
    )
    assert kl_to_teacher(table, teacher, slice(1, 4)).max() < 1e-3
    assert [len(metrics), metrics[-1]["version"]] == [100, 200]
    assert metrics[-1]["loss"] < 1e-3 < metrics[0]["loss"]


def test_demonstrations_made_ready_for_sft_are_conversations(make_table, chat, rows):
    table, teacher = make_table(), TableTeacher()
    demonstrations = sft.prepare([chat.demonstration(row) for row in rows])
    config = DistillConfig(max_num_steps=1, k=2)
    (metrics,) = distill.train_offline(policy=table, teacher=teacher, batches=iter([demonstrations]), config=config)
    assert metrics["trained_tokens"] == demonstrations.trainable.sum()


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(make_table, make_engine, prompts, chat):
    config = DistillConfig(max_num_steps=6, num_prompts=4, k=3, steps_per_generation=2)

    def rest(steps_taken):
        table = make_table()
        stopped = dataclasses.replace(config, max_num_steps=steps_taken) if steps_taken else None
        batches = itertools.repeat(make_rows())
        train = functools.partial(distill.train_offline, policy=table, teacher=TableTeacher(), batches=batches)
        if stopped is not None:
            list(train(config=stopped))
        list(train(config=config, steps_taken=steps_taken, version=steps_taken))
        return table.logits.detach()

    torch.testing.assert_close(rest(2), rest(0), rtol=0, atol=0)


@given(
    cut=st.integers(1, 7),
    padding=st.integers(0, 3),
    seed=st.integers(0, 100),
    way=st.sampled_from([{"beta": 0.0}, {"beta": 1.0}, {"beta": 0.4}]),
)
def test_the_gradient_depends_on_neither_microbatches_nor_padding_nor_order(make_table, cut, padding, seed, way):
    rows, teacher = make_rows(seed=seed, width=5), TableTeacher()
    config = DistillConfig(max_num_steps=1, k=3, **way)
    expected = gradient_of(make_table(), distill.prepare(rows, teacher, k=3), config)
    order = torch.randperm(7, generator=torch.Generator().manual_seed(seed))
    padded = {"tokens": rows.tokens, "trainable": rows.trainable}
    wide = {name: torch.nn.functional.pad(tensor, (0, padding))[order] for name, tensor in padded.items()}
    examples = distill.prepare(Rows(lengths=rows.lengths[order], **wide), teacher, k=3)
    torch.testing.assert_close(gradient_of(make_table(cut=cut), examples, config), expected, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, -torch.inf])
def test_what_stands_at_tokens_that_are_not_trained_on_changes_nothing(garbage):
    examples = distill.prepare(make_rows(), TableTeacher(), k=3)
    config = DistillConfig(max_num_steps=1, k=3)
    mask = examples.trainable[..., None].expand_as(examples.logp_teacher)
    results = []
    for there in (0.0, garbage):
        filled = dataclasses.replace(examples, logp_teacher=torch.where(mask, examples.logp_teacher, there))
        logp = torch.where(mask, torch.tensor(-1.5, dtype=torch.float64), there).requires_grad_()
        value, sums = distill.loss(logp, filled, config=config, num_tokens=11)
        results.append((value.detach(), torch.autograd.grad(value, logp)[0], sums))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
    assert results[1][1].isfinite().all()


def test_a_microbatch_without_a_trainable_token_contributes_a_zero_that_can_be_differentiated():
    rows = make_rows()
    examples = distill.prepare(dataclasses.replace(rows, trainable=rows.trainable & False), TableTeacher(), k=3)
    logp = torch.zeros(examples.logp_teacher.shape, requires_grad=True)
    value, _ = distill.loss(logp, examples, config=DistillConfig(max_num_steps=1), num_tokens=5)
    assert value.item() == 0.0
    assert (torch.autograd.grad(value, logp)[0] == 0).all()


@pytest.mark.parametrize("way", [{"beta": 0.0, "tail": "ignore"}, {"beta": 1.0}, {"beta": 0.4}])
def test_the_steps_gradient_is_that_of_finite_differences(make_table, way):
    examples = distill.prepare(make_rows(), TableTeacher(), k=3)
    config = DistillConfig(max_num_steps=1, k=3, **way)
    table = make_table(lr=0.0)
    found, width = gradient_of(table, examples, config), 1e-6
    logits = table.logits.data
    for place in [(1, 2), (3, 0), (4, 5)]:
        value = logits[place].item()
        sides = []
        for side in (value + width, value - width):
            logits[place] = side
            sides.append(distill.step(table, examples, config)["loss"])
        logits[place] = value
        assert found[place].item() == pytest.approx((sides[0] - sides[1]) / (2 * width), abs=1e-7)


def test_the_advantage_of_one_word_a_token_distils_through_the_loss_of_grpo(make_table, make_engine, chat, rows):
    from rl_algorithms.policy_gradient import prepare

    table, teacher = make_table(lr=2.0), TableTeacher()
    engine = make_engine(table, seed=1)
    objective = Objective(
        advantage=AdvantageConfig(baseline="none", scale="none"),
        ratio=RatioConfig(surrogate="reinforce", proximal="sampler"),
        selection=SelectionConfig(groups_without_signal="keep"),
    )
    before = kl_to_teacher(table, teacher, slice(1, 3)).sum()
    for version in range(1, 41):
        prompts = [chat.prompt(row) for row in rows]
        world = {"engine": engine, "sampling": MAX_NEW_TOKENS, "environment": NoReward(), "chat": chat}
        examples = prepare(collect(prompts, group_size=8, **world), objective)
        advantage = distill.advantage(teacher.logp(examples), examples.logp_old).float()
        examples = dataclasses.replace(examples, advantage=advantage)
        counts = policy_gradient.Counts.of(examples.trainable)
        table.forward_backward(examples, functools.partial(policy_gradient.loss, objective=objective, counts=counts))
        table.optim_step()
        engine(version=version)
    assert kl_to_teacher(table, teacher, slice(1, 3)).sum() < 0.2 * before


def test_an_environment_adds_a_reward_to_the_log_and_takes_out_what_failed(make_table, make_engine, prompts, chat):
    class Fails:
        def step(self, conversations):
            return [
                EnvironmentReturn(reward=2.0, terminated=True, failed=None if index % 2 else "no tool")
                for index, _ in enumerate(conversations)
            ]

    config = DistillConfig(max_num_steps=1, num_prompts=4, k=2)
    (judged,) = run(make_table(), TableTeacher(), make_engine, prompts, chat, config, environment=Fails())
    (alone,) = run(make_table(), TableTeacher(), make_engine, prompts, chat, config)
    assert judged["reward"] == 2.0
    assert judged["failed"] == 0.5
    assert judged["trained_tokens"] < judged["sampled_tokens"] == alone["trained_tokens"] == alone["sampled_tokens"]
    assert not [name for name in alone if "reward" in name and not name.startswith("phase_s/")]


def test_a_batch_whose_rollouts_all_failed_ends_the_run_and_says_why(make_table, make_engine, prompts, chat):
    class FailsAll:
        def step(self, conversations):
            return [EnvironmentReturn(reward=0.0, terminated=True, failed="no tool") for _ in conversations]

    table, teacher = make_table(), TableTeacher()
    config = DistillConfig(max_num_steps=1, num_prompts=4, k=2)
    with pytest.raises(ValueError, match=r"all 4 rows failed, .*; the first: no tool"):
        run(table, teacher, make_engine, prompts, chat, config, environment=FailsAll())
    assert [table.version, teacher.asked] == [0, 0]


def test_the_share_that_the_words_cover_is_reported(make_table):
    table, teacher = make_table(), TableTeacher()
    examples = distill.prepare(make_rows(), teacher, k=2)
    metrics = distill.step(table, examples, DistillConfig(max_num_steps=1, k=2))
    assert metrics["teacher_mass"] == pytest.approx(
        examples.logp_teacher[examples.trainable].exp().sum(-1).mean().item()
    )
    assert 0 < metrics["student_mass"] < 1


def test_rows_without_a_trainable_token_are_refused(make_table):
    rows = make_rows()
    rows = dataclasses.replace(rows, trainable=rows.trainable & False)
    config = DistillConfig(max_num_steps=1, k=2)
    with pytest.raises(ValueError, match="none of the 56 tokens of this step is trainable"):
        distill.step(make_table(), distill.prepare(rows, TableTeacher(), k=2), config)
    with pytest.raises(ValueError, match="none of the 56 tokens of this batch is trainable"):
        list(distill.train_offline(policy=make_table(), teacher=TableTeacher(), batches=iter([rows]), config=config))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 0.7])
def test_a_teacher_that_says_no_log_probability_is_refused_by_row_and_token(value):
    teacher = TableTeacher()
    teacher.log_p[3, :] = value
    rows = make_rows()
    rows.trainable[:, 3] = False
    rows.trainable[4, 3] = True
    with pytest.raises(ValueError, match=r"in the place of row 4, token 3 are no log-probabilities"):
        distill.prepare(rows, teacher, k=2)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"k": 0}, "k=0 must be >= 1"),
        ({"beta": 1.5}, "beta=1.5 must be from 0"),
        ({"beta": -0.1}, "beta=-0.1 must be from 0"),
        ({"beta": torch.nan}, "beta=nan must be a finite number"),
        ({"tail": "ignore"}, "tail='ignore' and beta=1.0: without its tail the reverse KL"),
        ({"tail": "renormalize", "k": 1}, "tail='renormalize' makes the one word of k=1 certain"),
        ({"num_prompts": 0}, "num_prompts=0 must be >= 1"),
        ({"teacher_prompt_template": "{prompt}"}, "at least one more name in braces"),
        ({"teacher_prompt_template": "{prompt}{successful_response}"}, "num_generations_per_prompt=1 samples one"),
        ({"steps_per_generation": 4}, "max_num_steps=6 must be a multiple of steps_per_generation=4"),
    ],
)
def test_a_configuration_that_means_nothing_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        DistillConfig(max_num_steps=6, **wrong)


@pytest.mark.parametrize(
    ("way", "line"),
    [
        ({}, "D = sum_S Q (log Q - log P),"),
        ({"beta": 0.0, "tail": "ignore"}, "D = sum_S P (log P - log Q),"),
        ({"beta": 0.25, "interpolation": "mixed"}, "D = 0.75 sum_S P (log P - log Q) + 0.25 sum_S Q (log Q - log P),"),
        ({"beta": 0.25}, "D = 0.25 sum_S P (log P - log M) + 0.75 sum_S Q (log Q - log M),  M = 0.25 P + 0.75 Q,"),
    ],
)
def test_a_configuration_explains_itself(way, line):
    text = DistillConfig(max_num_steps=1, k=20, **way).explain()
    assert line in text
    assert "the 20 words" in text
    assert text == distill.explain(DistillConfig(max_num_steps=1, k=20, **way))
    assert ("one more" in text) == (way.get("tail") is None)


def shifted_kl(teacher, student, positions, shift):
    """The mean over `positions` of KL(Q || P), where the teacher has read `shift` tokens more than the student."""
    log_q = student.logits.detach().log_softmax(-1)[positions]
    log_p = teacher.log_p[[place + shift for place in positions]]
    return (log_q.exp() * (log_q - log_p)).sum(-1).mean().item()


def test_a_teacher_that_reads_the_answer_is_compared_at_the_same_tokens_of_the_response(
    make_table, make_engine, prompts, chat
):
    table, teacher = make_table(), TableTeacher()
    config = DistillConfig(
        max_num_steps=1, num_prompts=4, k=VOCABULARY, tail="renormalize", teacher_prompt_template="{prompt}{answer}"
    )
    expected = make_table()
    (metrics,) = run(table, teacher, make_engine, prompts, chat, config)
    rollouts = collect(
        next(prompts), group_size=1, engine=make_engine(expected, seed=1), sampling=4, environment=NoReward(), chat=chat
    )
    places = rollouts.response.nonzero()[:, 1].tolist()
    assert metrics["loss"] == pytest.approx(shifted_kl(teacher, expected, places, 1), rel=1e-9)
    assert metrics["trained_tokens"] == len(places)


def test_demonstrations_are_learnt_from_a_teacher_that_reads_more(make_table, chat, rows):
    table, teacher = make_table(lr=0.0), TableTeacher()
    config = DistillConfig(max_num_steps=1, k=VOCABULARY, tail="renormalize")
    given = distill.demonstrations(rows, chat, template="{prompt}00{answer}")  # three tokens more
    (metrics,) = distill.train_offline(policy=table, teacher=teacher, batches=iter([given]), config=config)
    assert metrics["loss"] == pytest.approx(shifted_kl(teacher, table, [1, 2], 3), rel=1e-9)
    assert given.teacher_tokens[2].tolist() == [4, 2, 2, 5, 5, 1]
    with pytest.raises(DataError, match="row 0: teacher_prompt_template names the column 'hint'"):
        distill.demonstrations(rows, chat, template="{prompt}{hint}")
    with pytest.raises(ValueError, match="demonstrations are given: name a column"):
        distill.demonstrations(rows, chat, template="{prompt}{successful_response}")


def test_a_response_is_shown_the_first_other_that_succeeded_and_without_one_trains_nothing(
    make_table, make_engine, prompts, chat
):
    world = {"engine": make_engine(make_table()), "sampling": 2, "environment": NoReward(), "chat": chat}
    batch = next(prompts)
    rollouts = dataclasses.replace(
        collect(batch, group_size=4, **world),
        answers=tuple(str(row % 4) for row in range(16)),
        rewards=torch.tensor([0.0, 1.0, 0.0, 1.0] + [0.0, 0.0, 1.0, 0.0] + 8 * [0.0], dtype=torch.float64),
    )
    made = of_rollouts(rollouts, batch, chat, template="{prompt}{successful_response}", success_reward=1.0)
    shown = [row for row in range(16) if made.trainable[row].any()]
    assert shown == [0, 1, 2, 3, 4, 5, 7]  # row 6 alone succeeded in its group
    assert [made.teacher_tokens[row, 1].item() - 2 for row in shown] == [1, 3, 1, 1, 2, 2, 2]
    assert made.shift[shown].tolist() == [1] * 7


def test_a_batch_without_a_success_takes_no_step(make_table, make_engine, prompts, chat):
    table, teacher = make_table(), TableTeacher()
    config = DistillConfig(
        max_num_steps=1,
        num_prompts=4,
        num_generations_per_prompt=2,
        teacher_prompt_template="{prompt}{successful_response}",
    )
    (metrics,) = run(table, teacher, make_engine, prompts, chat, config, environment=NoReward())
    assert [metrics["version"], metrics["rows_without_tokens"], teacher.asked] == [0, 8.0, 0]
    assert "loss" not in metrics


class Tokenizer:
    chat_template = None
    eos_token_id = 1

    def __init__(self, *, size=12, first=2):
        self.size, self.first = size, first

    def __len__(self):
        return self.size

    def __call__(self, text, *, add_special_tokens):
        return {"input_ids": [self.first + int(character) for character in text]}

    def apply_chat_template(self, conversation, **options):
        raise AssertionError("there is no template")

    def decode(self, token_ids, *, skip_special_tokens):
        raise AssertionError("nothing is decoded")


def test_models_of_different_tokenizers_are_refused():
    distill.require_same_tokenizer(Tokenizer(), Tokenizer())
    with pytest.raises(ValueError, match="the student's tokenizer has 12 tokens and the teacher's 13"):
        distill.require_same_tokenizer(Tokenizer(), Tokenizer(size=13))
    with pytest.raises(ValueError, match=r"makes \[2, 3, .* of '0123456789' and the teacher's \[1, 2,"):
        distill.require_same_tokenizer(Tokenizer(), Tokenizer(first=1))


def test_the_doubles_are_what_the_loops_ask_for(make_table):
    assert isinstance(make_table(), Student)
    assert isinstance(TableTeacher(), Teacher)
