"""What all engines have in common: one policy behind the embedded engine and vLLM.

The policy recites a story (see `families`), so that what a greedy answer holds, and where a stop string or a bad word
must end or turn it, is written down here and not taken from an engine.
"""

import asyncio
import random
from dataclasses import replace
from importlib.util import find_spec

import pytest

if find_spec("vllm") is None:
    pytest.skip("needs vLLM", allow_module_level=True)

pytest.register_assert_rewrite("companies")
import companies
import families
import torch
from companies import COMPANIES, SCHEDULES, STORY, answers
from families import recited
from hypothesis import given

from rl_generation import Sampling, TransformersEngine
from rl_generation.verify import verify_logp
from rl_generation.vllm import VllmEngine, VllmOptions

TOLERANCE = 1e-4
FAIR = 1e-6  # a fair sample fails so often, and without a seed each run draws another
EVERY = pytest.mark.parametrize("name", ["embedded", "vllm"])
ONCE, UPON, TIME, CAF, HALF, SECOND_HALF, LAST_BYTE, OP, END = (STORY[i] for i in (0, 1, 3, 6, 7, 8, 14, -3, -2))
ASCII = range(4, 98)  # tokens of one printable character
BARE_TIME = families.tokenizer().encode("time")[0]
GREEDY = Sampling(max_new_tokens=12, temperature=0.0)


@pytest.fixture(scope="module")
def policy():
    return families.reciting()


@pytest.fixture(scope="module")
def engines(policy, tmp_path_factory):
    path = families.save(policy, tmp_path_factory.mktemp("reciting"))
    options = VllmOptions(
        model=path,
        dtype="float32",
        enforce_eager=True,
        max_model_len=families.MAX_LENGTH,
        max_num_seqs=256,
        kv_cache_memory_bytes=64 << 20,
    )
    policy.config.max_position_embeddings = families.MAX_LENGTH  # of the embedded engine: one limit for all
    embedded = TransformersEngine(policy, stop_token_ids=[families.EOS], pad_token_id=0, tokenizer=families.tokenizer())
    with VllmEngine(options) as vllm:
        yield {"embedded": embedded, "vllm": vllm}


@pytest.fixture
def engine(engines, name):
    return engines[name]


# -- The same answers ---------------------------------------------------------------------------------------------


def test_greedy_answers_are_the_same(engines):
    prompts = [*families.prompts(6), [1, ONCE], STORY[:5]]
    given = {name: engine.generate(prompts, GREEDY) for name, engine in engines.items()}
    ours = given.pop("embedded")
    for theirs in given.values():
        assert answers(theirs) == answers(ours)
        for one, other in zip(ours, theirs, strict=True):
            assert one.logp == pytest.approx(other.logp, abs=TOLERANCE)
    assert ours[-2].tokens == recited(12, after=ONCE)


@EVERY
def test_logp_is_that_of_a_plain_forward(policy, engine):
    asked = [
        Sampling(max_new_tokens=24, n=8, seed=3, temperature=0.7, top_p=0.9, stop=(" sold", "P!")),
        Sampling(max_new_tokens=24, n=2, seed=4, temperature=1.3, top_k=7, ignore_eos=True),
        Sampling(max_new_tokens=24, n=2, seed=5, min_p=0.05),
        Sampling(max_new_tokens=24, n=2),
        GREEDY,
    ]
    agreement = verify_logp(engine, policy, prompts=families.prompts(len(asked)), sampling=asked)
    assert agreement.outside_support == 0, agreement.explain()
    assert agreement.max_abs_difference <= TOLERANCE, agreement.explain()


@EVERY
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_new_tokens=1, n=20_000, seed=7),
        Sampling(max_new_tokens=1, n=5_000),
        Sampling(max_new_tokens=1, n=5_000, seed=9, temperature=0.7, top_p=0.9),
        Sampling(max_new_tokens=1, n=5_000, temperature=0.7, top_p=0.9),
    ],
    ids=["seeded", "unseeded", "seeded-tempered-nucleus", "tempered-nucleus"],
)
def test_first_tokens_follow_the_distribution_of_the_model(policy, engine, sampling):
    prompt = [1, 9, 30]  # the story does not go on here: many tokens are likely
    expected = families.distribution(policy, prompt, temperature=sampling.temperature, top_p=sampling.top_p)
    drawn = [rollout.tokens[0] for rollout in engine.generate([prompt], sampling)]
    assert len(drawn) == sampling.n
    assert families.p_value(drawn, expected) >= FAIR


def test_the_statistic_notices_a_temperature_that_is_one_in_twenty_off(policy):
    prompt = [1, 9, 30]
    drawn = torch.multinomial(
        families.distribution(policy, prompt, temperature=1.05),
        20_000,
        replacement=True,
        generator=torch.Generator().manual_seed(0),
    )
    assert families.p_value(drawn.tolist(), families.distribution(policy, prompt)) < FAIR


# -- Seeds --------------------------------------------------------------------------------------------------------

SEEDED = Sampling(max_new_tokens=16, n=4, seed=21, temperature=1.8, ignore_eos=True)  # hot: no two answers are alike


@EVERY
def test_sample_j_of_seed_s_is_seed_s_plus_j_alone(engine):
    prompt = [1, 9, 30]
    together = engine.generate([prompt], SEEDED)
    assert len({each.tokens for each in together}) == SEEDED.n
    for sample, each in enumerate(together):
        (alone,) = engine.generate([prompt], replace(SEEDED, n=1, seed=SEEDED.seed + sample))
        assert alone.tokens == each.tokens
        assert alone.logp == pytest.approx(each.logp, abs=TOLERANCE)


@EVERY
@pytest.mark.parametrize("seed", [None, 21])
def test_equal_prompts_of_one_call_get_different_answers(engine, seed):
    rollouts = engine.generate([[1, 9, 30]] * 8, replace(SEEDED, seed=seed))
    assert len({each.tokens for each in rollouts}) == 8 * SEEDED.n


@EVERY
def test_the_same_seed_gives_the_same_answers_again_and_no_seed_others(engine):
    def tokens(seed):
        return [each.tokens for each in engine.generate([[1, 9, 30]] * 2, replace(SEEDED, seed=seed))]

    assert tokens(21) == tokens(21)
    assert set(tokens(21)).isdisjoint(tokens(22 + SEEDED.n))
    assert set(tokens(None)).isdisjoint(tokens(None))


@pytest.mark.parametrize("name", ["vllm"])
def test_a_stream_is_the_answer_piece_by_piece(engine):
    sampling = replace(SEEDED, temperature=1.0, stop=("é s", "TOP"))
    expected = engine.generate([[1, 9, 30]], [sampling])

    async def collect():
        return [delta async for delta in engine.stream([1, 9, 30], sampling)]

    deltas = asyncio.run(collect())
    for sample, each in enumerate(expected):
        whole = companies.check_deltas([delta for delta in deltas if delta.sample_index == sample])
        companies.check_same([whole], [each])


# -- Bad input ----------------------------------------------------------------------------------------------------

LONG = families.MAX_LENGTH
BAD = {
    "an empty prompt": lambda: ([[1], []], GREEDY),
    "an id beyond the vocabulary": lambda: ([[1], [1, families.VOCAB_SIZE]], GREEDY),
    "a negative id": lambda: ([[1], [-1]], GREEDY),
    "no token id": lambda: ([[1], ["a"]], GREEDY),
    "a prompt that leaves no room": lambda: ([[1], [1] * LONG], GREEDY),
    "a prompt that leaves too little room": lambda: ([[1], [1] * (LONG - 11)], GREEDY),
    "a stop token beyond the vocabulary": lambda: ([[1]], replace(GREEDY, stop_token_ids=(families.VOCAB_SIZE,))),
    "fewer samplings than prompts": lambda: ([[1], [2]], [GREEDY]),
    "no answers": lambda: ([[1]], replace(GREEDY, n=0)),
    "no tokens": lambda: ([[1]], replace(GREEDY, max_new_tokens=0)),
    "NaN temperature": lambda: ([[1]], replace(GREEDY, temperature=float("nan"))),
    "a temperature that vLLM would raise": lambda: ([[1]], replace(GREEDY, temperature=1e-3)),
    "NaN top-p": lambda: ([[1]], replace(GREEDY, top_p=float("nan"))),
    "a bad word of no tokens": lambda: ([[1]], replace(GREEDY, bad_words=(" ",))),
    "an empty stop string": lambda: ([[1]], replace(GREEDY, stop=("",))),
    "a stop string that is none": lambda: ([[1]], replace(GREEDY, stop="END")),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_input_gets_one_error_from_all_engines_before_anything_runs(engines, bad):
    errors = {}
    for name, engine in engines.items():
        before = replace(engine.metrics(), time_s=0.0)
        with pytest.raises(ValueError, match=r"\w") as error:
            engine.generate(*BAD[bad]())
        errors[name] = (type(error.value), str(error.value).replace(engine.limits.max_length_name, "the limit"))
        assert replace(engine.metrics(), time_s=0.0) == before
    assert len(set(errors.values())) == 1, errors


@EVERY
def test_the_longest_request_is_served(engine):
    (rollout,) = engine.generate([[1] * (LONG - 12)], replace(GREEDY, ignore_eos=True))
    assert len(rollout.tokens) == 12
    assert rollout.finish_reason == "length"


# -- Stop strings and bad words -----------------------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize(
    ("stop", "count"),
    [
        ((" time",), 3),  # a token of its own
        (("ime",), 3),  # inside a token
        (("upon a",), 2),  # begins inside the first
        (("me, the c",), 6),  # spans four tokens
        (("é",), 8),  # one character of two tokens
        (("fé s",), 9),
        (("🙂",), 14),  # of four
        ((" 🙂 an",), 15),
        (("STOP!", "and", "Once", "en"), 15),  # the one that is complete first
        (("n a", " a"), 2),  # both complete in one token: the one that ends first, or stands first
        (("a", "time"), 2),
        (("!",), 20),  # the last token before eos
    ],
)
def test_a_stop_string_ends_an_answer_with_the_token_that_completes_it(engine, stop, count):
    sampling = Sampling(max_new_tokens=40, temperature=0.0, stop=stop)
    (rollout,) = engine.generate([[1, ONCE]], sampling)
    text = families.STORY.removeprefix("Once")
    ends = {each: text.find(each) + len(each) for each in stop if each in text}
    assert rollout.tokens == recited(count, after=ONCE)
    assert (rollout.finish_reason, rollout.stop_reason) == ("stop", min(ends, key=ends.get))
    assert len(rollout.logp) == count


@EVERY
@pytest.mark.parametrize(
    ("prompt", "stop"),
    [
        ([1, *STORY[:4]], " time"),  # in the prompt
        ([1, *STORY[:4]], "upon a time,"),  # begins in the prompt
        ([1, ONCE], "ce upon"),
        ([1, ONCE], "</s>"),  # special tokens are no text
        ([1, ONCE], "zzz"),
    ],
)
def test_what_is_not_in_the_text_of_the_answer_stops_nothing(engine, prompt, stop):
    sampling = Sampling(max_new_tokens=40, temperature=0.0, stop=(stop,))
    (rollout,) = engine.generate([prompt], sampling)
    assert rollout.tokens == recited(len(STORY) - len(prompt) + 1, after=prompt[-1])
    assert (rollout.finish_reason, rollout.stop_reason) == ("stop", families.EOS)


@EVERY
@pytest.mark.parametrize("sampling_stop", [" time", "zzz"])
def test_a_stop_string_in_the_last_token_that_is_allowed_is_a_stop(engine, sampling_stop):
    (rollout,) = engine.generate([[1, ONCE]], Sampling(max_new_tokens=3, temperature=0.0, stop=(sampling_stop,)))
    assert rollout.tokens == recited(3, after=ONCE)
    found = sampling_stop == " time"
    assert (rollout.finish_reason, rollout.stop_reason) == (("stop", " time") if found else ("length", None))


def test_stop_strings_are_found_alike_in_bytes_that_are_no_text(engines):
    draw = random.Random(0)
    prompts = [[*prompt, draw.choice(ASCII)] for prompt in families.prompts(100, longest=12)]
    kinds = ["e", " ", "\N{REPLACEMENT CHARACTER}", "é", "t", "O", "!", "<", "🙂", " s"]
    asked = [replace(GREEDY, ignore_eos=True, stop=tuple(draw.sample(kinds, 2))) for _ in prompts]
    ours, *others = (engine.generate(prompts, asked) for engine in engines.values())
    assert sum(isinstance(each.stop_reason, str) for each in ours) > 50
    assert len({each.tokens for each in ours}) > 50
    for theirs in others:
        assert answers(theirs) == answers(ours)


@EVERY
def test_a_stop_token_of_the_request_ends_it_even_where_eos_is_ignored(engine):
    both = replace(GREEDY, max_new_tokens=40, ignore_eos=True, stop=("P! On",))
    (rollout,) = engine.generate([[1, UPON]], both)
    assert rollout.tokens == recited(40, after=UPON)
    assert rollout.finish_reason == "length"  # "!" is followed by eos, which is no text, and then by "Once"
    (rollout,) = engine.generate([[1, UPON]], replace(both, stop=("P!On",)))
    assert (rollout.finish_reason, rollout.stop_reason) == ("stop", "P!On")
    (rollout,) = engine.generate([[1, UPON]], replace(both, stop_token_ids=(TIME, families.EOS), stop=(" time",)))
    assert rollout.tokens == recited(2, after=UPON)
    assert (rollout.finish_reason, rollout.stop_reason) == ("stop", TIME)  # which is then no text


@EVERY
@pytest.mark.parametrize(
    ("word", "kept", "banned"),
    [
        ("time", 2, TIME),  # one token, with a space and without
        (" time", 2, TIME),
        ("é", 7, SECOND_HALF),  # two tokens, of which the first may come
        ("🙂", 13, LAST_BYTE),
        ("STOP", 18, OP),
        ("!", 19, END),
    ],
)
def test_the_token_that_would_complete_a_bad_word_is_never_drawn(engine, policy, word, kept, banned):
    sampling = Sampling(max_new_tokens=kept + 1, temperature=0.0, bad_words=(word,))
    (rollout,) = engine.generate([[1, ONCE]], sampling)
    assert rollout.tokens[:kept] == recited(kept, after=ONCE)
    logits = forward(policy, [1, ONCE, *rollout.tokens[:-1]])
    assert int(logits.argmax()) == banned
    logits[[banned, *([BARE_TIME] if "time" in word else [])]] = -torch.inf
    assert rollout.tokens[-1] == int(logits.argmax())
    assert rollout.logp[-1] == pytest.approx(float(logits.log_softmax(-1).max()), abs=TOLERANCE)


@EVERY
@pytest.mark.parametrize(
    ("prompt", "word"),
    [
        ([1, CAF, HALF], "é"),  # the prompt begins it, and the answer has only its end
        (
            [1, CAF, HALF],
            "café",
        ),  # with a space it has three tokens, without one five: vLLM's rule then bans only those
    ],
)
def test_what_is_no_bad_word_of_the_answer_is_drawn(engine, prompt, word):
    sampling = Sampling(max_new_tokens=1, temperature=0.0, bad_words=(word,))
    assert engine.generate([prompt], sampling)[0].tokens == (SECOND_HALF,)


def forward(policy, tokens):
    with torch.no_grad():
        return policy(input_ids=torch.tensor([tokens])).logits[0, -1]


# -- Isolation ----------------------------------------------------------------------------------------------------


@EVERY
@companies.examples(20)
@given(company=COMPANIES)
def test_an_answer_is_what_its_request_gives_alone(engine, company):
    companies.check_company(engine, company, lambda prompt, sampling: engine.generate([prompt], [sampling]))


@EVERY
@companies.examples(15)
@given(schedule=SCHEDULES)
def test_those_that_come_and_are_aborted_midway_change_nothing(engine, schedule):
    companies.check_schedule(engine, schedule, lambda prompt, sampling: engine.generate([prompt], [sampling]))
