"""Tokens as text: the pieces make up the whole, and half a letter belongs to the token that ends it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_observe import token_sample
from rl_observe.samples import text_pieces


def bytes_decoder(tokens):
    return bytes(tokens).decode("utf-8", errors="replace")


def words_decoder(tokens):
    """As sentencepiece: a space before every word but the first of what is decoded."""
    return " ".join(f"w{token}" for token in tokens)


@given(st.text())
def test_the_pieces_of_byte_tokens_make_up_the_text(text):
    tokens = list(text.encode("utf-8", errors="ignore"))
    pieces = text_pieces(tokens, bytes_decoder)
    assert len(pieces) == len(tokens)
    assert "".join(pieces) == bytes_decoder(tokens)


@given(st.lists(st.integers(0, 20), max_size=40))
def test_the_pieces_of_words_make_up_the_text_with_its_spaces(tokens):
    assert "".join(text_pieces(tokens, words_decoder)) == words_decoder(tokens)


def test_half_a_letter_has_no_text_until_it_is_whole():
    assert text_pieces(list("aé€".encode()), bytes_decoder) == ["a", "", "é", "", "", "€"]


@given(st.lists(st.integers(0, 255), max_size=60))
def test_any_bytes_give_one_piece_a_token(tokens):
    assert len(text_pieces(tokens, bytes_decoder)) == len(tokens)


def test_only_sampled_tokens_have_a_logp():
    sample = token_sample(
        [97, 98, 99],
        logp=[0.0, -0.25, 0.0],
        response=[False, True, False],
        turns=[-1, 0, -1],
        decode=bytes_decoder,
    )
    assert sample == {
        "pieces": ["a", "b", "c"],
        "logp": [None, -0.25, None],
        "trained": [False, True, False],
        "turns": [-1, 0, -1],
    }


def test_what_was_sampled_and_is_not_trained_on_is_kept_apart():
    sample = token_sample(
        [97, 98], logp=[-1.0, -2.0], response=[True, True], turns=[0, 0], decode=bytes_decoder, trained=[True, False]
    )
    assert (sample["logp"], sample["trained"]) == ([-1.0, -2.0], [True, False])


def test_lists_of_different_lengths_are_refused_by_name():
    with pytest.raises(ValueError, match="tokens has 2, logp has 1"):
        token_sample([1, 2], logp=[0.0], response=[True, True], turns=[0, 0], decode=bytes_decoder)
