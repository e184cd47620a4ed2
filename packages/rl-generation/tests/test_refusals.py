import pytest
import torch
from torch import nn

from rl_generation import LogpError, ModelError, PromptError, Sampling, TransformersEngine

SAMPLING = Sampling(max_new_tokens=4, temperature=0.0)


def engine(model, **options):
    return TransformersEngine(model, **({"stop_token_ids": [2], "pad_token_id": 0} | options))


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ([[1], []], "prompt 1 is empty"),
        ([[1], [1, 3, -7]], r"prompt 1 has token id -7 at position 2.*\[0, 40\)"),
        ([[1, 40]], r"prompt 0 has token id 40 at position 1.*\[0, 40\)"),
        ([[1], [1] * 61], "prompt 1 has 61 tokens.*max_new_tokens=4.*max_position_embeddings=64.*lower.* to 3 or less"),
        ([[1], [1.5]], "prompt 1 must be a sequence of integer token ids"),
        ([[1], 7], "prompt 1 is the number 7"),
    ],
)
def test_a_bad_prompt_is_refused_by_index_and_value_before_anything_runs(tiny, prompts, words):
    model = tiny("llama")
    served = engine(model)
    model.register_forward_pre_hook(lambda *_: pytest.fail("generation began"))
    with pytest.raises(PromptError, match=f"(?s){words}"):
        served.generate(prompts, SAMPLING)


def test_the_longest_admitted_prompt_is_served(tiny):
    assert len(engine(tiny("llama")).generate([[1] * 60], SAMPLING)) == 1


def test_prompts_may_be_tensors(tiny):
    served = engine(tiny("llama"))
    asked = served.generate([torch.tensor([1, 5])], SAMPLING)
    assert asked[0].tokens == served.generate([[1, 5]], SAMPLING)[0].tokens


@pytest.mark.parametrize("options", [{"stop_token_ids": [2, 40]}, {"pad_token_id": 40}, {"pad_token_id": -1}])
def test_stop_and_pad_tokens_outside_the_vocabulary_are_refused(tiny, options):
    name, value = next(iter(options.items()))
    with pytest.raises(PromptError, match=rf"{name} must hold ids in \[0, 40\).*got {40 if value != -1 else -1}"):
        engine(tiny("llama"), **options)


def test_a_stop_token_of_a_call_outside_the_vocabulary_is_refused(tiny):
    with pytest.raises(PromptError, match=r"stop_token_ids.*got 99"):
        engine(tiny("llama")).generate([[1]], Sampling(max_new_tokens=4, stop_token_ids=(99,)))


@pytest.mark.parametrize("options", [{"max_batch_size": 0}, {"max_cache_tokens": 0}, {"version": -1}])
def test_an_option_out_of_range_is_refused_with_its_value(tiny, options):
    name, value = next(iter(options.items()))
    with pytest.raises(ValueError, match=f"got {name}={value}"):
        engine(tiny("llama"), **options)


def test_a_negative_version_is_not_committed(tiny):
    served = engine(tiny("llama"), version=5)
    with pytest.raises(ValueError, match="got version=-2"):
        served.commit_version(-2)
    assert served.version == 5


def test_a_model_put_back_into_training_mode_is_refused(tiny):
    model = tiny("llama")
    served = engine(model)
    model.model.layers[1].train()
    with pytest.raises(ModelError, match=r"training mode \(module 'model.layers.1'\)"):
        served.generate([[1]], SAMPLING)


def test_ready_can_refuse_every_call(tiny):
    def poisoned():
        raise RuntimeError("the last refit left torn weights")

    served = engine(tiny("llama"), ready=poisoned)
    with pytest.raises(RuntimeError, match="torn weights"):
        served.generate([[1]], SAMPLING)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_name_their_prompt_and_token_and_are_never_a_zero(tiny, temperature):
    model = tiny("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[33] = torch.nan
    served = engine(model, version=6)
    sampling = Sampling(max_new_tokens=1, temperature=temperature)
    assert len(served.generate([[1, 5], [1, 6, 7]], sampling)) == 2
    with pytest.raises(LogpError, match=r"prompt 1: token 0 of its answer, id \d+, has logp=nan.* version 6"):
        served.generate([[1, 5], [1, 33], [1, 6, 7]], sampling)


def test_a_row_that_breaks_does_not_run_to_the_limit(tiny):
    model = tiny("llama")
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.nan)
    served, forwards = engine(model), []
    model.register_forward_hook(lambda *_: forwards.append(1))
    with pytest.raises(LogpError, match="prompt 0: token 0"):
        served.generate([[1, 5]], Sampling(max_new_tokens=40))
    assert len(forwards) == 1


def test_an_encoder_decoder_is_refused_by_name():
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(vocab_size=40, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    with pytest.raises(ModelError, match=r"T5ForConditionalGeneration cannot be served.*has an encoder"):
        engine(transformers.T5ForConditionalGeneration(config))


def test_a_wrapped_model_is_refused_by_name(tiny):
    class Wrapped(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model, self.config = model, model.config

        def forward(self, *args, **kwargs):
            return self.model(*args, **kwargs)

    with pytest.raises(ModelError, match=r"Wrapped cannot be served.*without a wrapper"):
        engine(Wrapped(tiny("llama")))


def test_a_request_that_the_cache_can_never_hold_is_refused(tiny):
    served = engine(tiny("llama"), max_cache_tokens=12)
    assert len(served.generate([[1] * 8], SAMPLING)[0].tokens) == 4
    with pytest.raises(PromptError, match=r"prompt 0 has 9 tokens.*max_new_tokens=4.*max_cache_tokens=12"):
        served.generate([[1] * 9], SAMPLING)


@pytest.mark.parametrize("words", [{"stop": ("ab",)}, {"bad_words": ("ab",)}])
def test_text_without_a_tokenizer_is_refused(tiny, words):
    with pytest.raises(PromptError, match=r"no tokenizer"):
        engine(tiny("llama")).generate([[1]], Sampling(max_new_tokens=4, **words))
