from threading import Thread

import pytest
import torch

from rl_generation import Sampling, TransformersEngine

PROMPTS = [[1, 5, 6], [1, 7], [3, 4, 5, 6, 7, 8, 9, 10, 11], [1, 5, 6], [9], [1, 22, 30, 4], [1, 5, 6], [8, 8]]
STOPS = [2, 11, 12, 13, 14, 15]
GREEDY = Sampling(max_new_tokens=24, temperature=0.0)
FAMILIES = ["llama", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3", "gpt2", "mistral", "phi3"]


def engine(model, **options):
    return TransformersEngine(
        model, **({"stop_token_ids": STOPS, "pad_token_id": 0, "continuous_batching": "required"} | options)
    )


def generate_of_transformers(model, prompts, max_new_tokens):
    """Greedy answers of `model.generate`, cut after the first stop token."""
    width = max(map(len, prompts))
    tokens = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    output = model.generate(
        tokens,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=max_new_tokens,
        pad_token_id=0,
        eos_token_id=STOPS,
    )
    answers = output[:, width:].tolist()
    ends = [next((i + 1 for i, token in enumerate(answer) if token in STOPS), len(answer)) for answer in answers]
    return [tuple(answer[:end]) for answer, end in zip(answers, ends, strict=True)]


def plain_logp(model, prompt, answer):
    """[T, V] raw log-softmax before each token of `answer`, from one forward without cache or padding."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *answer]]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 : -1]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_transformers_generate_token_for_token(tiny, family):
    model = tiny(family)
    rollouts = engine(model).generate(PROMPTS, GREEDY)
    assert [rollout.tokens for rollout in rollouts] == generate_of_transformers(model, PROMPTS, 24)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_logp_is_the_raw_log_softmax_of_a_plain_forward(tiny, family):
    model = tiny(family)
    for prompt, rollout in zip(PROMPTS, engine(model).generate(PROMPTS, GREEDY), strict=True):
        logp = plain_logp(model, prompt, rollout.tokens).log_softmax(-1)
        expected = logp[torch.arange(len(rollout.tokens)), list(rollout.tokens)]
        torch.testing.assert_close(torch.tensor(rollout.logp), expected, rtol=0, atol=1e-5)
        assert rollout.logp_of == "sampled"


@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_logp_is_tempered_cut_and_renormalised(tiny, family):
    model = tiny(family)
    sampling = Sampling(max_new_tokens=12, temperature=1.7, top_k=5, seed=0)
    for prompt, rollout in zip(PROMPTS, engine(model).generate(PROMPTS, sampling), strict=True):
        best = (plain_logp(model, prompt, rollout.tokens) / 1.7).topk(5)
        for step, token in enumerate(rollout.tokens):
            place = best.indices[step].tolist().index(token)
            assert rollout.logp[step] == pytest.approx(best.values[step].log_softmax(0)[place].item(), abs=1e-5)
        assert rollout.logp_of == "sampled"


def test_these_greedy_answers_finish_at_different_times(tiny):
    """Otherwise the tests above would not see rows dropped."""
    lengths = {len(rollout.tokens) for rollout in engine(tiny("llama")).generate(PROMPTS, GREEDY)}
    assert len(lengths) >= 3


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(max_new_tokens=24, seed=3)], ids=["greedy", "seeded"])
@pytest.mark.parametrize("max_batch_size", [1, 3])
def test_answers_do_not_depend_on_the_batch_size(tiny, sampling, max_batch_size):
    model = tiny("qwen3")
    whole = engine(model).generate(PROMPTS, sampling)
    cut = engine(model, max_batch_size=max_batch_size).generate(PROMPTS, sampling)
    assert [rollout.tokens for rollout in cut] == [rollout.tokens for rollout in whole]


def test_greedy_answers_follow_their_prompts_in_any_order_and_company(tiny):
    served = engine(tiny("llama"))
    alone = [served.generate([prompt], GREEDY)[0].tokens for prompt in PROMPTS]
    assert len(set(alone)) >= 5, "prompts whose answers are equal would hide a mix-up"
    assert [rollout.tokens for rollout in served.generate(PROMPTS[::-1], GREEDY)] == alone[::-1]


def test_a_seeded_answer_depends_on_its_own_seed_and_not_on_the_other_prompts(tiny):
    served = engine(tiny("llama"))
    sampling = Sampling(max_new_tokens=24, seed=5)
    first = served.generate(PROMPTS[:3], sampling)
    others = served.generate([*PROMPTS[:3], [4, 4, 4], [5]], sampling)
    assert [rollout.tokens for rollout in others[:3]] == [rollout.tokens for rollout in first]


def test_one_seed_repeats_and_another_differs(tiny):
    served = engine(tiny("llama"))
    answers = [served.generate(PROMPTS, Sampling(max_new_tokens=24, seed=seed)) for seed in (7, 7, 8)]
    assert answers[0] == answers[1]
    assert [r.tokens for r in answers[0]] != [r.tokens for r in answers[2]]


def test_without_a_seed_the_running_generator_goes_on_and_the_engine_seed_repeats_it(tiny):
    model = tiny("llama")
    sampling = Sampling(max_new_tokens=24)
    one, two, other = engine(model, seed=1), engine(model, seed=1), engine(model, seed=2)
    first, second = one.generate(PROMPTS, sampling), one.generate(PROMPTS, sampling)
    two.generate(PROMPTS, Sampling(max_new_tokens=3, seed=9))  # a seeded or greedy call leaves the generator alone
    two.generate(PROMPTS, GREEDY)
    assert first != second
    assert [two.generate(PROMPTS, sampling), two.generate(PROMPTS, sampling)] == [first, second]
    assert other.generate(PROMPTS, sampling) != first


def test_rollouts_of_one_prompt_differ_from_one_another(tiny):
    rollouts = engine(tiny("llama", initializer_range=0.02)).generate([[1, 5, 6]] * 8, Sampling(max_new_tokens=8))
    assert len({rollout.tokens for rollout in rollouts}) == 8


def test_20000_answers_of_one_token_follow_the_models_softmax(tiny):
    model = tiny("llama", vocab_size=10, initializer_range=0.1)
    served = engine(model, stop_token_ids=[], max_batch_size=20_000)
    rollouts = served.generate([[1, 5, 6]] * 20_000, Sampling(max_new_tokens=1, seed=0))
    with torch.no_grad():
        expected = 20_000 * model(input_ids=torch.tensor([[1, 5, 6]])).logits[0, -1].double().softmax(0)
    observed = torch.tensor([rollout.tokens[0] for rollout in rollouts]).bincount(minlength=10)
    # Of chi-square with 9 degrees of freedom, one fair sample in 10,000 lies above 33.72.
    assert ((observed - expected) ** 2 / expected).sum() < 33.72


def test_an_answer_ends_with_its_stop_token_or_at_the_limit(tiny):
    rollouts = engine(tiny("llama")).generate(PROMPTS, GREEDY)
    assert {rollout.finish_reason for rollout in rollouts} == {"stop", "length"}
    for rollout in rollouts:
        assert rollout.truncated == (rollout.finish_reason == "length")
        assert not set(rollout.tokens[:-1]) & set(STOPS)
        assert (rollout.tokens[-1] in STOPS) == (rollout.finish_reason == "stop")
        assert len(rollout.tokens) == len(rollout.logp) <= 24
        assert rollout.finish_reason == "stop" or len(rollout.tokens) == 24


def test_a_stop_token_on_the_last_step_counts_as_a_stop(tiny):
    model = tiny("llama")
    free = engine(model, stop_token_ids=[]).generate([[1, 5, 6]], Sampling(max_new_tokens=4, temperature=0))[0]
    end = next(i for i, token in enumerate(free.tokens) if free.tokens.index(token) == i and i > 0)
    sampling = Sampling(max_new_tokens=end + 1, temperature=0, stop_token_ids=(free.tokens[end],))
    rollout = engine(model, stop_token_ids=[]).generate([[1, 5, 6]], sampling)[0]
    assert rollout.tokens == free.tokens[: end + 1]
    assert rollout.finish_reason == "stop"


def test_a_stop_token_of_one_call_is_forgotten_by_the_next(tiny):
    served = engine(tiny("llama"), stop_token_ids=[])
    free = served.generate([[1, 5, 6]], Sampling(max_new_tokens=6, temperature=0))
    stopped = served.generate(
        [[1, 5, 6]], Sampling(max_new_tokens=6, temperature=0, stop_token_ids=(free[0].tokens[0],))
    )
    assert stopped[0].tokens == free[0].tokens[:1]
    assert served.generate([[1, 5, 6]], Sampling(max_new_tokens=6, temperature=0)) == free


def test_a_pad_token_that_is_also_a_stop_token_changes_nothing(tiny):
    model = tiny("llama")
    expected = engine(model).generate(PROMPTS, GREEDY)
    assert engine(model, pad_token_id=STOPS[0]).generate(PROMPTS, GREEDY) == expected


def test_every_rollout_carries_the_committed_version(tiny):
    served = engine(tiny("llama"), version=3)
    assert served.version == 3
    assert {rollout.version for rollout in served.generate(PROMPTS, GREEDY)} == {3}
    served.commit_version(4)
    assert {rollout.version for rollout in served.generate(PROMPTS, GREEDY)} == {4}


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_copied_in_place_serve_the_next_call(tiny, family):
    model, newer = tiny(family), tiny(family, seed=1)
    if family == "gpt2":  # random GPT-2 weights differ too little to change greedy answers
        newer.load_state_dict({name: 3 * tensor for name, tensor in newer.state_dict().items()})
    served = engine(model)
    before = served.generate(PROMPTS, GREEDY)
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), newer.parameters(), strict=True):
            mine.copy_(theirs)
    after = served.generate(PROMPTS, GREEDY)
    assert after == engine(newer).generate(PROMPTS, GREEDY)
    assert after != before


@pytest.mark.parametrize("family", ["llama", "llama_longrope"])
def test_generation_leaves_no_inference_tensor_and_no_gradient_behind(tiny, family):
    model = tiny(family)
    engine(model).generate(PROMPTS, GREEDY)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        assert not tensor.is_inference(), name
        assert tensor.grad is None, name
        with torch.no_grad():
            tensor.copy_(tensor.clone())


def test_no_prompts_give_no_rollouts(tiny):
    assert engine(tiny("llama")).generate([], GREEDY) == []


def test_the_engine_switches_its_model_to_eval_mode(tiny):
    model = tiny("llama").train()
    engine(model)
    assert not model.training


def test_a_model_in_bfloat16_is_served_and_its_logp_are_its_own(tiny):
    model = tiny("llama").bfloat16()
    served = engine(model)
    for prompt, rollout in zip(PROMPTS, served.generate(PROMPTS, GREEDY), strict=True):
        logp = plain_logp(model, prompt, rollout.tokens).float().log_softmax(-1)
        expected = logp[torch.arange(len(rollout.tokens)), list(rollout.tokens)]
        torch.testing.assert_close(torch.tensor(rollout.logp), expected, rtol=0, atol=0.2)
    assert "torch.bfloat16" in served.explain()


def test_eager_attention_gives_the_same_answers(tiny):
    model = tiny("llama")
    expected = engine(model).generate(PROMPTS, GREEDY)
    model.set_attn_implementation("eager")
    served = engine(model)
    assert [r.tokens for r in served.generate(PROMPTS, GREEDY)] == [r.tokens for r in expected]
    assert "attention: eager" in served.explain()
    assert model.config._attn_implementation == "eager"


def test_explain_names_engine_cache_attention_and_quirks(tiny):
    told = engine(tiny("gemma3"), version=7).explain()
    for fact in [
        "TransformersEngine over Gemma3ForCausalLM, torch.float32 on cpu",
        "version: 7",
        "batching: continuous",
        "cache: static slots, at most",
        "attention: sdpa",
        "logp: sampled",
        "quirk: sliding windows are masked",
        "quirk: the model's generation_config is not read",
    ]:
        assert fact in told
    assert "sliding" not in engine(tiny("llama")).explain()
    assert "quirk: longrope" in engine(tiny("llama_longrope")).explain()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_seed_draws_the_same_on_a_gpu(tiny):
    model = tiny("llama")
    sampling = Sampling(max_new_tokens=8, seed=3)
    expected = [rollout.tokens for rollout in engine(model).generate(PROMPTS, sampling)]
    moved = engine(model.to("cuda"))
    assert [rollout.tokens for rollout in moved.generate(PROMPTS, sampling)] == expected


def test_the_raw_logp_is_the_models_whatever_was_drawn_from(tiny):
    model = tiny("llama")
    sampling = Sampling(max_new_tokens=12, temperature=1.7, top_k=5, seed=0)
    for prompt, rollout in zip(PROMPTS, engine(model, logp_of="raw").generate(PROMPTS, sampling), strict=True):
        logp = plain_logp(model, prompt, rollout.tokens).log_softmax(-1)
        expected = logp[torch.arange(len(rollout.tokens)), list(rollout.tokens)]
        torch.testing.assert_close(torch.tensor(rollout.logp), expected, rtol=0, atol=1e-5)
        assert rollout.logp_of == "raw"


def test_the_models_own_attention_is_put_back_after_every_call(tiny):
    model = tiny("llama")
    served = engine(model)
    served.generate(PROMPTS, GREEDY)
    assert model.config._attn_implementation == "sdpa"
    model.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        served.generate(PROMPTS, GREEDY)
    assert model.config._attn_implementation == "sdpa"
    assert served.metrics().running == served.metrics().waiting == 0


def test_a_model_of_the_same_config_runs_in_another_thread_while_the_engine_does(tiny):
    policy = tiny("llama")
    tokens = torch.tensor([[1, 5, 6]])
    expected, seen = policy(input_ids=tokens).logits, []
    served = engine(type(policy)(policy.config))

    def run_policy(*_):
        thread = Thread(target=lambda: seen.append(policy(input_ids=tokens).logits))
        thread.start()
        thread.join()

    served.model.register_forward_pre_hook(run_policy)
    served.generate([[1, 5]], Sampling(max_new_tokens=2, temperature=0))
    assert len(seen) == 2
    assert all(torch.equal(logits, expected) for logits in seen)


def test_an_engines_model_has_configs_of_its_own_which_its_parts_share_as_before(tiny):
    def configs(model):
        return [part.config for part in model.modules() if hasattr(part, "config")]

    model = tiny("gemma3")
    before = configs(model)
    after = configs(engine(model).model)
    assert {id(config) for config in before}.isdisjoint(id(config) for config in after)
    assert len({id(config) for config in after}) == len({id(config) for config in before})
    assert [config.to_dict() for config in after] == [config.to_dict() for config in before]


@pytest.mark.parametrize("longer", ["embedding", "head"])
def test_the_vocabulary_is_what_embedding_and_head_share(tiny, longer):
    model = tiny("llama")
    if longer == "embedding":
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight[:30].clone())
    else:
        model.model.embed_tokens.weight = torch.nn.Parameter(model.model.embed_tokens.weight[:30].clone())
    served = engine(model)
    assert served.limits.vocab_size == 30
    cut, uncut = Sampling(max_new_tokens=4, top_k=5, seed=0), Sampling(max_new_tokens=4, temperature=0)
    if longer == "embedding":
        assert len(served.generate([[1, 5], [1, 6]], [cut, uncut])) == 2


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_stop_tokens_and_words_may_come_as_lists(tiny, ignore_eos):
    sampling = Sampling(max_new_tokens=3, temperature=0, stop_token_ids=[7], bad_words=[], ignore_eos=ignore_eos)
    assert (sampling.stop_token_ids, sampling.bad_words) == ((7,), ())
    assert len(engine(tiny("llama"), stop_token_ids=[2]).generate([[1, 5]], [sampling])) == 1


def test_engines_made_over_one_model_each_attend_to_their_own_cache(tiny):
    model, sampling = tiny("llama"), Sampling(max_new_tokens=24, seed=1)
    one, two = engine(model), engine(model)
    alone = engine(tiny("llama")).generate(PROMPTS, sampling)
    assert one.generate(PROMPTS, sampling) == two.generate(PROMPTS, sampling) == alone
