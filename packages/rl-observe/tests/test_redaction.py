"""Credentials are found by their keys and by their looks, and nothing else is touched."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_observe import REDACTED, Secrets, redact, redacted_keys


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"api_key": "abc"}, {"api_key": REDACTED}),
        ({"hf": {"token": "abc"}}, {"hf": {"token": REDACTED}}),
        ({"dbPassword": "abc"}, {"dbPassword": REDACTED}),
        ({"password": 1234}, {"password": REDACTED}),
        ({"env_vars": {"WANDB_API_KEY": "abc"}}, {"env_vars": {"WANDB_API_KEY": REDACTED}}),
        ({"env_vars": {"MY_TOKENS_2": "abc"}}, {"env_vars": {"MY_TOKENS_2": REDACTED}}),
        ({"env_vars": ["HF_TOKEN=abc", "NCCL_DEBUG=INFO"]}, {"env_vars": [f"HF_TOKEN={REDACTED}", "NCCL_DEBUG=INFO"]}),
        ({"cluster.env_vars.MY_KEYS": "abc", "a.b": 1}, {"cluster.env_vars.MY_KEYS": REDACTED, "a.b": 1}),
        ({"uri": "https://me:pw@host/x"}, {"uri": f"https://{REDACTED}@host/x"}),
        ({"uri": "https://host/x?token=abc&y=1"}, {"uri": f"https://host/x?token={REDACTED}&y=1"}),
        ({"args": ["--api-key=abc"]}, {"args": [f"--api-key={REDACTED}"]}),
        ({"note": "use hf_abcdefghijklmnopqrst please"}, {"note": f"use {REDACTED} please"}),
        ({"header": "Bearer abcdefghij"}, {"header": REDACTED}),
    ],
)
def test_a_credential_is_taken_out(data, expected):
    assert redact(data) == expected


@pytest.mark.parametrize(
    "data",
    [
        {"max_new_tokens": 4, "num_samples_with_tokens": 2, "pad_token": "<pad>", "eos_token": "</s>"},
        {"prompt_key": "question", "metric_name": "held_out_greedy", "token_level": "mean"},
        {"env_vars": {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": 1, "TOKENIZERS_PARALLELISM": "false"}},
        {"model_name": "Qwen/Qwen3-0.6B", "source": "https://host/a@b", "git": "ssh://git@host/x"},
        {"api_key": None, "use_auth": True, "token": "${env:HF_TOKEN}", "secret": ""},
        {"tracking_uri": "sqlite:///folder/mlflow.db", "betas": [0.9, 0.999]},
    ],
)
def test_what_is_no_credential_stays_as_it_is(data):
    assert redact(data) == data
    assert redacted_keys(data) == []


def test_what_was_taken_out_is_found_again_by_its_key():
    data = redact({"policy": {"env_vars": {"HF_TOKEN": "abc", "A": "b"}}, "logger": {"uri": "http://u:p@h"}, "n": [1]})
    assert redacted_keys(data) == ["policy.env_vars.HF_TOKEN", "logger.uri"]


def test_secrets_leave_every_text_but_are_not_shown_themselves():
    secrets = Secrets.of({"env_vars": {"HF_TOKEN": "p@ss word"}, "uri": "http://user:hunter22@host"})
    told = secrets.scrub({"message": "cannot use p@ss word or p%40ss%20word at host", "list": ["user:hunter22", 3]})
    assert told == {"message": f"cannot use {REDACTED} or {REDACTED} at host", "list": [REDACTED, 3]}
    assert "p@ss" not in repr(secrets)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=12), inner, max_size=3),
    max_leaves=12,
)


@given(plain)
def test_the_shape_stays_and_a_second_time_changes_nothing(data):
    once = redact(data)
    assert redact(once) == once
    json.dumps(once)
    assert isinstance(Secrets.of(data), Secrets)


@given(st.text(min_size=1), st.sampled_from(["HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "MY_PASSWORD", "X_API_KEY_2"]))
def test_no_value_of_a_credentials_variable_survives(value, name):
    found = redact({"cluster": {"env_vars": {name: value}}})["cluster"]["env_vars"][name]
    assert found == REDACTED or value.startswith("${env:")


piece = st.sampled_from(
    ["token=", "://", "user:pw", "@host", "api_key", '"', ": ", "'", ";", "\n", " ", "hf_abcdefghijklmnopqrst", "$HOME",
     "Bearer ", "abcdefghijk",
     "-----BEGIN PRIVATE KEY-----", "PASSWORD=", "\u017fecret=", "hunter22", "<redacted>", "git@"]
)  # fmt: skip


@given(st.lists(st.lists(piece, max_size=5).map("".join), max_size=5))
def test_texts_are_scrubbed_together_as_each_is_alone(texts):
    secrets = Secrets(values=("hunter22",))
    assert secrets.scrub(texts) == [secrets.scrub(text) for text in texts]
    assert secrets.scrub({text: (text, None) for text in texts}).keys() == {secrets.scrub(text) for text in texts}
