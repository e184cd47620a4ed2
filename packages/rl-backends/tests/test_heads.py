"""Claims about what is read from hidden states besides log-probabilities: values, scores, entropies, words.

Each equals what one plain model says of one row at a time, without padding and from full logits; on two ranks too.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import os
import signal
from pathlib import Path

import pytest
import torch

from rl_backends import BatchError, DTensorBackend, DTensorConfig, KernelsConfig, ModelError
from rl_backends.readers import Head, token_logp_reader

PROGRAM = Path(__file__).parent / "programs" / "heads.py"
RANKS = 2
LAYOUTS = {
    "padded": {"micro_batch_size": 3},
    "packed": {"micro_batch_size": 4, "sequence_packing": True},
    "shared prefixes": {"micro_batch_size": 4, "sequence_packing": True, "share_prefixes": True},
    "by tokens": {"micro_batch_tokens": 30},
}
MESHES = {
    "FSDP": {"micro_batch_size": 2},
    "FSDP, packed": {"sequence_packing": True},
    "TP": {"tensor_parallel_size": 2, "micro_batch_size": 4},
    "TP, packed": {"tensor_parallel_size": 2, "sequence_packing": True},
    "FSDP, shared prefixes": {"sequence_packing": True, "share_prefixes": True},
    "TP, shared prefixes": {"tensor_parallel_size": 2, "sequence_packing": True, "share_prefixes": True},
    "TP, sequence parallel": {"tensor_parallel_size": 2, "sequence_parallel": True},
    "CP": {"context_parallel_size": 2},
}
CLASSIFIERS = {
    f"{family}, {mesh}": {"claim": "classifier", "family": family, "rows": 5, "config": config}
    for mesh, config in MESHES.items()
    if mesh != "CP"
    for family in (("Llama", "Qwen3") if mesh in {"FSDP", "TP"} else ("Qwen3",))
}
LANGUAGE_MODELS = {
    f"language model, {mesh}": {
        "claim": "language model",
        "family": "Qwen3",
        "rows": 5,
        "config": MESHES[mesh],
        "temperature": 0.7,
    }
    for mesh in ("FSDP", "TP", "TP, sequence parallel", "CP", "FSDP, packed")
}
REFUSED = {"refused": {"claim": "refused", "family": "Qwen3", "config": MESHES["CP"]}}
CLASSIFIERS["one rank without rows"] = {"claim": "classifier", "family": "Llama", "rows": 1, "config": {}}


@pytest.fixture(scope="module")
def program():
    spec = importlib.util.spec_from_file_location("heads_program", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def results(tmp_path_factory, start_program):
    """What each rank wrote; one launch runs all cases."""
    folder = tmp_path_factory.mktemp("ranks")
    cases = CLASSIFIERS | LANGUAGE_MODELS | REFUSED
    process = start_program(PROGRAM, {"cases": cases, "ranks": RANKS, "folder": str(folder)})
    try:
        assert process.wait(timeout=600) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):  # it has ended, and its ranks with it
            os.killpg(process.pid, signal.SIGKILL)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(RANKS)]


def plain_values(model, examples):
    """The head's number before each trainable token, and at the last token of each row."""
    values, scores = torch.zeros(examples.tokens.shape), []
    for row, length in enumerate(examples.lengths.tolist()):
        tokens = examples.tokens[row, :length]
        said = model.score(model.model(input_ids=tokens[None], use_cache=False).last_hidden_state)[0, :, 0]
        places = torch.arange(1, length)[examples.trainable[row, 1:length]]
        values = values.index_put((torch.tensor([row]), places), said[places - 1])
        scores.append(said[-1])
    return values, torch.stack(scores)


def plain_classifier(world, program, *, family, rows):
    model, examples = program.make_classifier(family).eval(), world.make_examples(rows=rows)
    with torch.no_grad():
        values, scores = plain_values(model, examples)
    result = {"values": values, "scores": scores}
    for output, loss in program.LOSSES.items():
        model.zero_grad()
        said = plain_values(model, examples)[output == "score"]
        value, sums = loss(said, examples, num_tokens=examples.trainable.sum())
        value.backward()
        gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        result[output] = {"loss": sums["loss"].double(), "gradients": gradients}
    return result


def plain_language_model(world, program, *, family, rows, temperature):
    model, examples = world.make_model(family).eval(), world.make_examples(rows=rows)
    entropy = torch.zeros(examples.tokens.shape)
    top_logp = torch.zeros(*examples.tokens.shape, program.K)
    top_ids = torch.zeros(*examples.tokens.shape, program.K, dtype=torch.int64)
    for row, length in enumerate(examples.lengths.tolist()):
        with torch.no_grad():
            logits = model(input_ids=examples.tokens[row, None, :length]).logits[0] / temperature
        logp = logits.log_softmax(-1)
        for place in range(1, length):
            if examples.trainable[row, place]:
                entropy[row, place] = -(logp[place - 1].exp() * logp[place - 1]).sum()
                top_logp[row, place], top_ids[row, place] = logp[place - 1].topk(program.K)
    result = {"entropy": entropy, "top_logp": top_logp, "top_ids": top_ids}
    loss = functools.partial(world.words_loss, num_tokens=examples.trainable.sum())
    for output in program.WORDS_OUTPUTS:
        result[output] = plain_gradients(model, world.asking(examples), loss, output=output, temperature=temperature)
    return result


def plain_gradients(model, examples, loss, *, output, temperature):
    """Loss and gradients of what `output` asks for, of full logits."""
    words = examples.token_ids if output == "logp_of_token_ids" else torch.zeros(*examples.tokens.shape, 2)
    asked = torch.zeros(words.shape)
    for row, length in enumerate(examples.lengths.tolist()):
        log_p = (model(input_ids=examples.tokens[row, None, :length]).logits[0] / temperature).log_softmax(-1)
        places = torch.arange(1, length)[examples.trainable[row, 1:length]]
        log_p = log_p[places - 1]
        if output == "logp_of_token_ids":
            said = log_p.gather(-1, words[row, places])
        else:
            logp = log_p.gather(-1, examples.tokens[row, places, None])[:, 0]
            said = torch.stack([logp, -(log_p.exp() * log_p).sum(-1)], -1)
        asked = asked.index_put((torch.tensor([row]), places), said)
    model.zero_grad()
    value, sums = loss(asked, examples)
    value.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    return {"loss": sums["loss"].double(), "gradients": gradients}


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_scores_and_their_gradients_are_those_of_one_row_at_a_time(world, program, family, layout):
    found = program.read_classifier(world, {"family": family, "rows": 6, "config": LAYOUTS[layout]})
    expected = plain_classifier(world, program, family=family, rows=6)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_two_ranks_say_the_values_and_have_the_gradients_of_one_plain_model(world, program, results, name):
    case = CLASSIFIERS[name]
    expected = plain_classifier(world, program, family=case["family"], rows=case["rows"])
    for result in (rank[name] for rank in results):
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


def test_a_score_is_what_hugging_face_says_of_a_row(world, program):
    examples = world.make_examples()
    examples.tokens.clamp_(min=1)  # 0 is padding, which Hugging Face looks for to find the last token
    model = program.make_classifier("Llama").eval()
    with torch.no_grad():
        rows = zip(examples.tokens, examples.lengths.tolist(), strict=True)
        expected = torch.stack([model(input_ids=row[None, :length]).logits[0, 0] for row, length in rows])
    scores = DTensorBackend(program.make_classifier("Llama"), DTensorConfig()).score(examples)
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_entropies_words_and_their_gradients_are_those_of_full_logits(world, program, layout):
    case = {"family": "Llama", "rows": 6, "temperature": 1.3}
    found = program.read_language_model(world, {**case, "config": LAYOUTS[layout]})
    torch.testing.assert_close(found, plain_language_model(world, program, **case), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_two_ranks_say_entropies_and_words_and_have_the_gradients_of_full_logits(world, program, results, name):
    case = {key: LANGUAGE_MODELS[name][key] for key in ("family", "rows", "temperature")}
    expected = plain_language_model(world, program, **case)
    for result in (rank[name] for rank in results):
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


def without_words(examples):
    return None


def of_one_word(examples):
    return examples.token_ids[..., 0]


def as_numbers(examples):
    return examples.token_ids.float()


def beyond_the_vocabulary(examples):
    row, column = examples.trainable.nonzero()[0].tolist()
    examples.token_ids[row, column, 2] = 67
    return examples.token_ids


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (without_words, r"output='logp_of_token_ids' is of examples.token_ids \[B, T, K\], and Examples has no tensor"),
        (of_one_word, r"token_ids are torch.int64 \[6, 13\], and tokens \[6, 13\]: token_ids must be integers"),
        (as_numbers, r"token_ids are torch.float32 \[6, 13, 4\]"),
        (beyond_the_vocabulary, r"row 0: token_ids of token \d+ have the id 67, and the model's ids are from 0 to 66"),
    ],
)
def test_words_that_cannot_be_asked_about_are_refused_and_leave_the_gradient(world, words, message):
    examples = world.asking(world.make_examples())
    token_ids = words(examples)
    asked = world.make_examples() if token_ids is None else dataclasses.replace(examples, token_ids=token_ids)
    backend = DTensorBackend(world.make_model("Llama"), DTensorConfig())
    loss = functools.partial(world.token_loss, num_tokens=examples.trainable.sum())
    backend.forward_backward(examples, loss)
    before = [parameter.grad.clone() for parameter in backend.model.parameters()]
    with pytest.raises(BatchError, match=message):
        backend.forward_backward(asked, loss, output="logp_of_token_ids")
    torch.testing.assert_close([parameter.grad for parameter in backend.model.parameters()], before, rtol=0, atol=0)


def test_an_output_that_there_is_not_is_refused_by_name():
    with pytest.raises(ValueError, match=r"output='entropy' must be one of 'logp', 'logp_and_entropy'"):
        token_logp_reader("entropy", Head(logit_scale=1.0, softcap=None, kernels=KernelsConfig()), 1.0)


def test_what_the_policy_was_may_be_its_teacher(world):
    examples = world.make_examples()
    backend = DTensorBackend(world.make_model("Llama"), DTensorConfig())
    expected = backend.topk_logits(examples, 3)
    teacher = backend.freeze_reference()
    with torch.no_grad():
        backend.model.get_output_embeddings().weight.zero_()
    found = teacher.topk_logits(examples, 3)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert not torch.equal(backend.topk_logits(examples, 3).logp, expected.logp)


def test_pairs_of_scores_train_a_reward_model(world, program):
    examples = world.make_examples(kind=world.Pairs)

    def prefer_the_first(scores, rows):
        total = -torch.nn.functional.logsigmoid(scores[0::2] - scores[1::2]).sum()
        return total / 3, {"pairs": torch.tensor(len(scores) // 2)}

    backend = DTensorBackend(program.make_classifier("Llama"), DTensorConfig(micro_batch_size=2))
    sums = backend.forward_backward(examples, prefer_the_first, output="score")
    model = program.make_classifier("Llama").eval()
    prefer_the_first(plain_values(model, examples)[1], examples)[0].backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    torch.testing.assert_close(program.gradients_of(backend.model), expected, rtol=1e-5, atol=1e-5)
    assert sums["pairs"].item() == 3


def test_a_model_is_asked_only_for_what_its_head_says(world, program):
    examples = world.make_examples()
    language_model = DTensorBackend(world.make_model("Llama"), DTensorConfig())
    for ask in (language_model.value, language_model.score):
        with pytest.raises(ModelError, match=r"LlamaForCausalLM has no head `score`.*head='sequence_classification'"):
            ask(examples)
    classifier = DTensorBackend(program.make_classifier("Llama"), DTensorConfig())
    asks = (classifier.logp, classifier.entropy, functools.partial(classifier.topk_logits, k=2))
    for ask in asks:
        with pytest.raises(ModelError, match=r"LlamaForSequenceClassification has no language-model head"):
            ask(examples)


def test_a_classifier_of_two_labels_is_refused_by_name(world, program):
    backend = DTensorBackend(program.make_classifier("Llama", num_labels=2), DTensorConfig())
    for ask in (backend.value, backend.score):
        with pytest.raises(ModelError, match=r"says 2 numbers of a token.*load it with num_labels=1"):
            ask(world.make_examples())


def test_two_ranks_refuse_a_classifier_under_context_parallelism_by_name(results):
    for result in (rank["refused"] for rank in results):
        assert "Qwen3ForSequenceClassification cannot be context parallel" in result
