import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

PROGRAMS = Path(__file__).parent / "programs"
sys.path.insert(0, str(PROGRAMS))
import saved_model
from unfinished import last_batch_waits

from rl_generation import Sampling
from rl_generation.cli import main
from rl_generation.commands.generate import Row, answer_line
from rl_generation.errors import SampleTimeoutError, TimedOutSample
from rl_generation.loading import load_transformers_engine
from rl_generation.rollout import Rollout, VersionSpan
from rl_generation.transformers_engine import TransformersEngine

MANY = 20  # prompts of the run that is killed
BATCHES = 5


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """As in the processes that are killed, so that every bit can be compared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return saved_model.save(tmp_path_factory.mktemp("model"))


@pytest.fixture
def generate(model, tmp_path, capsys):
    """Run the command on rows; return its exit code, its output's rows and what it said."""

    def run(rows, *flags, model=model, output="answers.jsonl"):
        write(tmp_path / "prompts.jsonl", rows)
        try:
            code = main(command(model, tmp_path / "prompts.jsonl", tmp_path / output, *flags))
        except SystemExit as end:
            code = end.code
        said = capsys.readouterr()
        path = tmp_path / output
        answers = read(path) if path.exists() else None
        return code, answers, said

    return run


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def command(model, prompts, output, *flags):
    named = ["--input", str(prompts), "--output", str(output)]
    return ["generate", str(model), *named, "--max-new-tokens", "6", *flags]


def test_answers_are_those_of_the_engine(generate, model):
    rows = [{"prompt_token_ids": [1, 40 + i]} for i in range(3)]
    code, answers, _ = generate(rows, "--seed", "5", "--n", "2", "--temperature", "0.7")
    assert code == 0
    engine, _ = load_transformers_engine(str(model), device="cpu")
    sampling = Sampling(max_new_tokens=6, seed=5, n=2, temperature=0.7)
    expected = engine.generate([row["prompt_token_ids"] for row in rows], sampling)
    assert [tuple(answer["token_ids"]) for answer in answers] == [rollout.tokens for rollout in expected]
    assert [(answer["index"], answer["sample_index"]) for answer in answers] == [
        (i, j) for i in range(3) for j in (0, 1)
    ]
    for answer, rollout in zip(answers, expected, strict=True):
        assert answer["logp"] == pytest.approx(rollout.logp, abs=1e-5)
        assert (answer["finish_reason"], answer["logp_of"]) == (rollout.finish_reason, "sampled")
        assert answer["versions"] == [[0, 0, len(rollout.tokens)]]


def test_biases_and_the_likeliest_tokens_reach_the_answers(generate):
    flags = ["--seed", "5", "--logit-bias", "7", "100", "--logit-bias", "8", "90", "--top-logp", "2", "--ignore-eos"]
    _, (answer,), _ = generate([{"prompt": "x"}], *flags)
    assert set(answer["token_ids"]) == {7}
    for (likeliest, logp), (second, _) in answer["top_logp"]:
        assert (likeliest, logp, second) == (7, pytest.approx(0, abs=1e-3), 8)


def test_text_and_messages_are_encoded_by_the_model_s_tokenizer(generate, model):
    _, tokenizer = load_transformers_engine(str(model), device="cpu")
    text = tokenizer.encode("hi")
    assert text[0] == tokenizer.bos_token_id
    chat = tokenizer.encode("<turn>user\nhi<eos><turn>assistant\n!", add_special_tokens=False)
    rows = [
        {"prompt": "hi", "id": "text"},
        {"prompt_token_ids": text},
        {"prompt_token_ids": text[1:]},
        {"messages": [{"role": "user", "content": "hi"}]},
        {"prompt_token_ids": chat},
    ]
    _, plain, _ = generate(rows, "--temperature", "0", "--chat-template-kwarg", "terse=true")
    ids = [answer["token_ids"] for answer in plain]
    assert ids[0] == ids[1] != ids[2]
    assert ids[3] == ids[4]
    assert [answer["row"] for answer in plain] == [{"id": "text"}, {}, {}, {}, {}]
    assert plain[0]["text"] == tokenizer.decode(ids[0], skip_special_tokens=True)


def test_a_row_gives_its_fields_to_its_answers(generate):
    _, answers, _ = generate([{"prompt": "x", "answer": [1, "é"]}, {"prompt": "x"}], "--n", "2")
    assert [answer["row"] for answer in answers] == [{"answer": [1, "é"]}] * 2 + [{}] * 2


def test_equal_prompts_get_different_answers_and_a_stop_string_cuts_the_text_alone(generate):
    _, answers, _ = generate([{"prompt": "x"}] * 4, "--seed", "1")
    assert len({tuple(answer["token_ids"]) for answer in answers}) == 4
    stop = next(c for answer in answers for c in answer["text"] if c.isascii() and c.isprintable())
    _, stopped, said = generate([{"prompt": "x"}] * 4, "--seed", "1", "--stop", stop, "--overwrite", "--json")
    ended = [(a, s) for a, s in zip(answers, stopped, strict=True) if s["stop_reason"] == stop]
    assert ended
    for answer, cut in ended:
        assert cut["text"] == answer["text"][: answer["text"].index(stop)]
        assert cut["token_ids"] == answer["token_ids"][: len(cut["token_ids"])]
        assert cut["finish_reason"] == "stop"
    figures = json.loads(said.out.splitlines()[-1])
    assert figures["finished"]["stop"] >= len(ended)
    assert figures["generated_tokens"] == sum(len(answer["token_ids"]) for answer in stopped)
    assert figures["holds"] is True


def test_the_default_seed_repeats_a_run_and_another_does_not(generate):
    rows = [{"prompt": "x"}] * 2
    _, first, _ = generate(rows)
    _, second, _ = generate(rows, output="second.jsonl")
    _, other, _ = generate(rows, "--seed", "1", output="other.jsonl")
    assert first == second
    assert [answer["token_ids"] for answer in first] != [answer["token_ids"] for answer in other]


def test_an_output_is_not_written_over_unless_asked(generate, tmp_path):
    rows = [{"prompt": "x"}]
    assert generate(rows)[0] == 0
    before = (tmp_path / "answers.jsonl").read_bytes()
    code, _, said = generate(rows)
    assert code == 2
    assert "go on with it by --resume, or lose it by --overwrite" in said.err
    assert (tmp_path / "answers.jsonl").read_bytes() == before
    assert generate(rows, "--overwrite")[0] == 0


def test_resuming_begins_where_there_is_nothing_and_ends_where_all_is_done(generate, tmp_path):
    rows = [{"prompt": "x"}] * 3
    assert generate(rows, "--resume")[0] == 0
    before = (tmp_path / "answers.jsonl").read_bytes()
    code, _, said = generate(rows, "--resume", "--json")
    assert code == 0
    assert "3 of 3 prompts are answered" in said.err
    assert "loading" not in said.err
    assert json.loads(said.out)["generated_tokens"] == 0
    assert (tmp_path / "answers.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("rows", "flags", "name"),
    [
        ([{"prompt": "x"}, {"prompt": "z"}], [], "rows"),
        ([{"prompt": "x"}], [], "rows"),
        ([{"prompt": "x"}, {"prompt": "y", "id": 1}], [], "rows"),
        ([{"prompt": "x"}, {"prompt": "y"}], ["--temperature", "0.5"], "temperature"),
        ([{"prompt": "x"}, {"prompt": "y"}], ["--seed", "4"], "seed"),
        ([{"prompt": "x"}, {"prompt": "y"}], ["--logp-of", "raw"], "logp_of"),
        ([{"prompt": "x"}, {"prompt": "y"}], ["--dtype", "bfloat16"], "dtype"),
    ],
)
def test_another_run_is_refused(generate, tmp_path, rows, flags, name):
    assert generate([{"prompt": "x"}, {"prompt": "y"}], "--seed", "3")[0] == 0
    before = (tmp_path / "answers.jsonl").read_bytes()
    seed = [] if "--seed" in flags else ["--seed", "3"]
    code, _, said = generate(rows, *seed, "--resume", *flags)
    assert code == 2
    assert f"\n  {name}: was " in said.err
    assert (tmp_path / "answers.jsonl").read_bytes() == before


def test_another_model_under_the_same_name_is_refused(generate, model, tmp_path):
    copied = tmp_path / "copy"
    shutil.copytree(model, copied)
    assert generate([{"prompt": "x"}], model=copied)[0] == 0
    assert generate([{"prompt": "x"}], "--resume")[0] == 0  # the same files elsewhere are the same model
    saved_model.save(copied, seed=1)
    code, _, said = generate([{"prompt": "x"}], "--resume", model=copied)
    assert code == 2
    assert "\n  model: was 'sha256:" in said.err


def test_an_output_without_a_record_is_not_gone_on_with(generate, tmp_path):
    (tmp_path / "answers.jsonl").write_text('{"index": 0}\n')
    code, _, said = generate([{"prompt": "x"}], "--resume")
    assert code == 2
    assert "answers.jsonl.run.json is damaged (FileNotFoundError" in said.err


def test_what_the_engine_would_refuse_is_refused_by_line_and_leaves_no_file(generate, tmp_path):
    rows = [{"prompt": "x"}, {"prompt_token_ids": [1, 999]}, {"prompt": "x" * saved_model.MAX_LENGTH}]
    code, answers, said = generate(rows)
    assert (code, answers) == (2, None)
    assert "prompts.jsonl, line 2: the prompt has token id 999 at position 1" in said.err
    _, _, said = generate([rows[0], rows[2]])
    assert "prompts.jsonl, line 2: the prompt has 129 tokens" in said.err
    assert not (tmp_path / "answers.jsonl.run.json").exists()
    assert generate(rows[:1])[0] == 0


def test_without_a_tokenizer_only_token_ids_go_in_and_out(generate, tmp_path):
    bare = saved_model.save(tmp_path / "bare", tokenizer=False)
    code, _, said = generate([{"prompt_token_ids": [1]}], model=bare)
    assert code == 2
    assert "has no tokenizer.json" in said.err
    code, _, said = generate([{"prompt_token_ids": [1]}, {"prompt": "x"}], "--no-tokenizer", model=bare)
    assert code == 2
    assert "line 2: prompt is text, and --no-tokenizer leaves nothing to encode it with" in said.err
    code, answers, _ = generate([{"prompt_token_ids": [1]}], "--no-tokenizer", model=bare)
    assert code == 0
    assert answers[0]["text"] is None
    assert answers[0]["token_ids"]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--temperature", "nan"], "temperature must be 0"),
        (["--n", "0"], "n must be an integer of at least 1"),
        (["--max-model-len", "9"], "vllm_kwargs={'max_model_len': 9} means nothing to the engine 'transformers'"),
        (["--vllm-kwarg", "x"], "--vllm-kwarg x: '' is not JSON (Expecting value): it takes KEY=JSON"),
        (["--vllm-kwarg", "x=yes"], """'yes' is not JSON (Expecting value): it takes KEY=JSON, such as"""),
        (["--vllm-kwarg", "x=yes"], """text needs quotes: x='"yes"'"""),
        (["--chat-template-kwarg", "nonsense=1"], "the chat template does not know the variable 'nonsense'"),
        (["--device", "nowhere"], "device='nowhere' cannot be used here"),
        (["--dtype", "int8"], "dtype must be 'auto' or a float of torch"),
        (["--max-batch-size", "0"], "max_batch_size must be at least 1"),
    ],
)
def test_misuse_is_refused_with_its_reason(generate, flags, reason):
    code, answers, said = generate([{"messages": [{"role": "user", "content": "x"}]}], *flags)
    assert (code, answers) == (2, None)
    assert reason in " ".join(said.err.replace("│", " ").split())


def test_a_sample_that_timed_out_has_a_line_of_its_own_and_the_others_are_kept(generate, monkeypatch):
    engine_generate = TransformersEngine.generate

    def with_a_timeout(engine, *asked):
        *kept, lost = engine_generate(engine, *asked)
        lost = TimedOutSample(prompt_index=lost.prompt_index, sample_index=lost.sample_index, tokens=lost.tokens[:1])
        raise SampleTimeoutError("one took too long", timed_out=[lost], rollouts=kept)

    monkeypatch.setattr(TransformersEngine, "generate", with_a_timeout)
    code, answers, said = generate([{"prompt": "x"}, {"prompt": "y", "id": "a"}], "--n", "2", "--seed", "1", "--json")
    assert code == 1
    assert [(answer["index"], answer["sample_index"]) for answer in answers] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert (answers[3]["row"], answers[3]["logp"], answers[3]["finish_reason"]) == ({"id": "a"}, None, "timeout")
    assert len(answers[3]["token_ids"]) == 1
    assert all(answer["logp"] for answer in answers[:3])
    assert "one took too long" in said.err
    figures = json.loads(said.out.splitlines()[-1])
    assert (figures["holds"], figures["finished"]["timeout"]) == (False, 1)


@pytest.fixture(scope="module")
def small_run(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    rows = [{"prompt": "x" * i} for i in range(1, 8)]
    write(folder / "prompts.jsonl", rows)
    flags = ["--seed", "9", "--dtype", "float32", "--n", "3"]
    assert main(command(model, folder / "prompts.jsonl", folder / "answers.jsonl", *flags)) == 0
    return folder, flags


def assert_same_answers(made, whole):
    """The same rows with the same tokens; a logp may round otherwise, since its batch was another one."""
    made, whole = list(read(made)), list(read(whole))
    assert len(made) == len(whole)
    for one, other in zip(made, whole, strict=True):
        assert one.pop("logp") == pytest.approx(other.pop("logp"), abs=1e-5)
        assert one == other


@settings(max_examples=8, deadline=None)
@given(share=st.floats(0, 1), zeros=st.booleans())
def test_a_run_torn_at_any_byte_and_resumed_gives_every_row_its_answers(small_run, model, share, zeros):
    folder, flags = small_run
    whole, torn = (folder / "answers.jsonl").read_bytes(), folder / "torn.jsonl"
    shutil.copyfile(folder / "answers.jsonl.run.json", folder / "torn.jsonl.run.json")
    # A crash of the machine may leave zeros where the end of the file should be.
    torn.write_bytes(whole[: int(share * len(whole))] + (b"\0\0\0" if zeros else b""))
    assert main(command(model, folder / "prompts.jsonl", torn, *flags, "--resume")) == 0
    assert_same_answers(torn, folder / "answers.jsonl")


@pytest.fixture(scope="module")
def uninterrupted(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("many")
    write(folder / "prompts.jsonl", [{"prompt": f"{i}"} for i in range(MANY)])
    flags = ["--seed", "2", "--dtype", "float32", "--max-new-tokens", "60", "--ignore-eos"]
    assert main(command(model, folder / "prompts.jsonl", folder / "answers.jsonl", *flags)) == 0
    return folder, flags


def test_a_killed_run_goes_on_and_gives_every_row_its_answers(uninterrupted, model, tmp_path):
    folder, flags = uninterrupted
    output = tmp_path / "answers.jsonl"
    arguments = command(model, folder / "prompts.jsonl", output, *flags)
    with subprocess.Popen(
        [sys.executable, PROGRAMS / "unfinished.py", str(BATCHES), str(MANY // BATCHES), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.DEVNULL,
    ) as process:
        wait_for_a_batch(output, give_up=lambda: process.poll() is not None)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    before = output.read_bytes()
    assert 0 < len(before) < (folder / "answers.jsonl").stat().st_size
    assert main([*arguments, "--resume"]) == 0
    assert output.read_bytes().startswith(before)  # what was done is kept
    assert_same_answers(output, folder / "answers.jsonl")


def test_a_termination_signal_ends_a_run_between_two_batches_or_in_one_and_it_goes_on(
    uninterrupted, model, tmp_path, capsys
):
    folder, flags = uninterrupted
    output = tmp_path / "answers.jsonl"
    arguments = command(model, folder / "prompts.jsonl", output, *flags)

    sent = threading.Event()

    def terminate():
        try:
            wait_for_a_batch(output, give_up=lambda: False)
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            sent.set()

    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # should it come too late
    try:
        killer = threading.Thread(target=terminate)
        with last_batch_waits(BATCHES, MANY // BATCHES, sent.wait):
            killer.start()
            code = main(arguments)
        killer.join()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert code == 130
    assert "the same command with --resume goes on" in capsys.readouterr().err
    assert main([*arguments, "--resume"]) == 0
    assert_same_answers(output, folder / "answers.jsonl")


def wait_for_a_batch(output, *, give_up):
    deadline = time.monotonic() + 240
    while not (output.exists() and output.stat().st_size) and not give_up():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    "flags", [["--max-new-tokens", "100000"], ["--device", "nowhere"], ["--engine", "vllm", "--dtype", "int8"]]
)
def test_what_is_refused_overwrites_nothing(generate, tmp_path, flags):
    rows = [{"prompt_token_ids": [1]}]
    assert generate(rows)[0] == 0
    files = [tmp_path / "answers.jsonl", tmp_path / "answers.jsonl.run.json"]
    before = [file.read_bytes() for file in files]
    assert generate(rows, "--overwrite", *flags)[0] == 2
    assert [file.read_bytes() for file in files] == before
    assert generate([{"prompt_token_ids": [1, 2]}], "--overwrite")[0] == 0
    assert files[1].read_bytes() != before[1]


@pytest.mark.parametrize(
    "record",
    [
        "[]",
        '"text"',
        "{",
    ],
)
def test_a_damaged_record_is_refused_by_its_name(generate, tmp_path, record):
    rows = [{"prompt_token_ids": [1]}]
    assert generate(rows)[0] == 0
    (tmp_path / "answers.jsonl.run.json").write_text(record)
    code, _, said = generate(rows, "--resume")
    assert code == 2
    assert "answers.jsonl.run.json is damaged" in said.err
    assert generate(rows, "--overwrite")[0] == 0


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--engine", "vllm", "--vllm-kwarg", "seed=1", "--vllm-kwarg", "seed=2"], "seed stands twice, with 1 and 2"),
        (["--chat-template-kwarg", "terse=true", "--chat-template-kwarg", "terse=true"], "terse stands twice"),
        (["--engine", "vllm", "--max-cache-tokens", "0"], "max_cache_tokens=0 means nothing to the engine 'vllm'"),
        (["--max-model-len", "0"], "max_model_len must be an integer of at least 1"),
        (["--max-model-len", "9", "--vllm-kwarg", "max_model_len=9"], "vllm_kwargs repeats 'max_model_len'"),
    ],
)
def test_a_flag_is_not_silently_passed_over(generate, flags, reason):
    code, answers, said = generate([{"prompt_token_ids": [1]}], *flags)
    assert (code, answers) == (2, None)
    assert reason in " ".join(said.err.replace("│", " ").split())


def test_the_text_of_an_answer_is_read_behind_its_prompt():
    backend = Tokenizer(models.WordLevel({"<s>": 0, "▁the": 1}, unk_token="<s>"))
    backend.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")
    row = Row(line=1, index=0, prompt=(0, 1), sampling=Sampling(max_new_tokens=1), others={})
    version = VersionSpan(version=0, start=0, end=1)
    made = Rollout(
        tokens=(1,), logp=(-1.0,), logp_of="sampled", finish_reason="stop", stop_reason=" the", versions=(version,)
    )
    lost = TimedOutSample(prompt_index=1, sample_index=0, tokens=(1,))
    assert [answer_line(answer, row, tokenizer)["text"] for answer in (made, lost)] == ["", " the"]
