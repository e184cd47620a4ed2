"""Log-probabilities over a vocabulary cut over ranks: values, gradients, their placements, collectives, refusals."""

import pytest

EXACT, GRADIENT = 2e-6, 5e-6

CUT = {
    "chunks": {"vocabulary": 128, "chunk_size": 5, "kept": False},
    "uneven": {"vocabulary": 129, "chunk_size": 50, "temperature": 0.7, "kept": False},
    "kept logits": {"vocabulary": 129, "temperature": 0.7},
    "without entropy": {"vocabulary": 129, "entropy": False, "chunk_size": 6, "kept": False},
    "capped": {
        "leading": (9,),
        "vocabulary": 129,
        "chunk_size": 4,
        "temperature": 1.3,
        "softcap": 5.0,
        "logit_scale": 0.5,
        "kept": False,
    },
    "capped, without entropy": {"vocabulary": 129, "entropy": False, "softcap": 5.0, "kept": False, "chunk_size": 4},
    "a weight alone": {"vocabulary": 129, "given": "weight", "chunk_size": 4, "kept": False},
    "bias": {"vocabulary": 129, "bias": True, "chunk_size": 5, "kept": False},
    "one row": {"leading": (1,), "vocabulary": 3, "chunk_size": 1, "kept": False},
    "no rows": {"leading": (0,), "vocabulary": 3},
    "ignored": {"vocabulary": 129, "ignored": 0.4, "chunk_size": 3, "kept": False, "bias": True},
    "all ignored": {"vocabulary": 129, "ignored": 1.1, "chunk_size": 3, "kept": False},
    "many words": {"leading": (3, 4), "vocabulary": 129, "words": 5, "chunk_size": 5, "kept": False, "ignored": 0.2},
}


@pytest.mark.parametrize("name", CUT)
def test_cut_vocabulary_equals_the_whole_one(ranks, name):
    for result in ranks("logp:parity", 2, **CUT[name]):
        assert max(result["values"]) < EXACT
        assert max(result["gradients"]) < GRADIENT
        assert result["placements"] == ["plain"] + ["(Shard(dim=0),)"] * (len(result["placements"]) - 1)
        assert result["forward"] == {"allreduce_": 2}  # whatever the number of chunks
        assert result["backward"] == {"allreduce_": 1}


@pytest.mark.parametrize(
    ("case", "placement"),
    [
        ({"leading": (16,), "hidden_placement": "shard 0"}, "(Shard(dim=0),)"),
        ({"leading": (17,), "hidden_placement": "shard 0", "bias": True, "ignored": 0.3}, "(Shard(dim=0),)"),
        ({"leading": (3, 5), "hidden_placement": "shard 1"}, "(Shard(dim=1),)"),
    ],
    ids=["rows", "odd rows, some ignored", "sequence"],
)
def test_sequence_parallel_hidden_is_gathered_once_and_its_gradient_reduce_scattered(ranks, case, placement):
    for result in ranks("logp:parity", 2, vocabulary=129, chunk_size=4, kept=False, **case):
        assert max(result["values"]) < EXACT
        assert max(result["gradients"]) < GRADIENT
        assert result["placements"][0] == placement
        assert result["forward"] == {"all_gather_into_tensor": 1, "allreduce_": 2}
        assert result["backward"] == {"reduce_scatter_tensor": 1}


def test_replicated_hidden_gets_a_replicated_gradient(ranks):
    for result in ranks("logp:parity", 2, vocabulary=129, hidden_placement="replicate"):
        assert max(*result["values"], *result["gradients"]) < GRADIENT
        assert result["placements"][0] == "(Replicate(),)"


@pytest.mark.parametrize("hidden_placement", ["plain", "replicate", "shard 0"])
def test_replicated_head_needs_no_collective_but_the_gather(ranks, hidden_placement):
    case = {"vocabulary": 13, "bias": True, "head_placement": "replicate", "hidden_placement": hidden_placement}
    for result in ranks("logp:parity", 2, leading=(5,), **case):
        assert max(*result["values"], *result["gradients"]) < GRADIENT
        assert result["placements"][1:] == ["(Replicate(),)"] * 2
        assert result["forward"] == ({"all_gather_into_tensor": 1} if hidden_placement == "shard 0" else {})
        assert result["backward"] == {}


def test_rank_without_a_word_takes_part(ranks):
    case = {"leading": (6,), "vocabulary": 5, "chunk_size": 4, "kept": False}
    for result in ranks("logp:parity", 4, **case):  # ceil(5 / 4) = 2 words a rank: 2, 2, 1, 0
        assert max(result["values"]) < EXACT
        assert max(result["gradients"]) < GRADIENT


def test_cut_vocabulary_in_bf16_has_fp32_statistics(ranks):
    for result in ranks("logp:parity", 2, vocabulary=129, dtype="bfloat16", chunk_size=4, kept=False, bias=True):
        assert set(result["dtypes"]) == {"torch.float32"}
        assert max(result["values"]) < 0.01
        assert max(result["gradients"]) < 0.03


def test_published_interval_is_wrong_where_the_vocabulary_divides_unevenly(ranks):
    """`rank * (V // tp)` onward: at V = 129 more than half of the log-probabilities, by nats, without any error."""
    for result in ranks("logp:published_interval", 2, vocabulary=129):
        share, largest = result["published"]
        assert share > 0.4
        assert largest > 5
        assert result["ours"] < 1e-4
    for result in ranks("logp:published_interval", 2, vocabulary=128):
        assert result["published"][0] == 0


@pytest.mark.parametrize(
    "case",
    [
        {"vocabulary": 129, "k": 7},
        {"vocabulary": 129, "k": 7, "dtype": "float64", "bias": True, "kept": False},
        {"vocabulary": 5, "k": 5, "kept": False},
        {"vocabulary": 129, "k": 3, "hidden_placement": "shard 0", "kept": False},
    ],
    ids=["uneven", "fp64, bias", "all words", "sequence-parallel"],
)
def test_top_k_of_a_cut_vocabulary_is_that_of_the_whole_one(ranks, case):
    for result in ranks("logp:top_k_parity", 2, **case):
        assert result["values"] < EXACT
        assert result["words"]
        assert max(result["gradients"]) < GRADIENT
        gathers = {"all_gather_into_tensor": 1} if "hidden_placement" in case else {}
        assert result["forward"] == {"allgather_": 1, **gathers}


def test_top_k_where_a_rank_has_no_word(ranks):
    for result in ranks("logp:top_k_parity", 4, vocabulary=5, k=4):
        assert result["words"]
        assert result["values"] < EXACT
        assert max(result["gradients"]) < GRADIENT


@pytest.mark.parametrize(
    "case",
    [
        {"vocabulary": 129, "words": 4},
        {"vocabulary": 129, "words": 4, "dtype": "float64", "bias": True, "kept": False},
        {"vocabulary": 129, "words": 3, "hidden_placement": "shard 0", "kept": False},
    ],
    ids=["uneven", "fp64, bias", "sequence-parallel"],
)
def test_given_words_of_a_cut_vocabulary_have_the_log_probabilities_of_the_whole_one(ranks, case):
    for result in ranks("logp:given_words", 2, **case):
        assert result["values"] < EXACT
        assert max(result["gradients"]) < GRADIENT
        gathers = {"all_gather_into_tensor": 1} if "hidden_placement" in case else {}
        assert result["forward"] == {"allreduce_": 2, **gathers}


@pytest.mark.parametrize("vocabulary", [8, 9])
def test_top_k_of_cut_logits(ranks, vocabulary):
    for result in ranks("logp:top_k_of_logits", 2, vocabulary=vocabulary, k=6):
        assert max(result["values"], result["gradient"]) < EXACT
        assert result["words"]
        assert result["unchanged"]


@pytest.mark.parametrize(
    "case",
    [
        {"vocabulary": 8},
        {"vocabulary": 9, "temperature": 1.0},
        {"vocabulary": 9, "ignored": 0.3},
        {"vocabulary": 9, "words": 3, "ignored": 0.3},
    ],
)
def test_cut_logits_equal_whole_ones_and_stay_as_they_are(ranks, case):
    for result in ranks("logp:logits_parity", 2, **case):
        assert max(result["values"]) < EXACT
        assert result["gradient"] < GRADIENT
        assert result["unchanged"]
        assert result["forward"] == {"allreduce_": 2}


def test_rank_whose_words_are_all_masked_adds_nothing(ranks):
    for result in ranks("logp:masked_words", 2, vocabulary=9, possible=4):
        assert max(*result["values"], result["gradient"]) < EXACT
        assert result["of_masked"] == 0
        assert result["top_words"] < 4


def test_mesh_of_one_rank_is_the_plain_result(ranks):
    assert ranks("logp:one_rank_meshes", 1) == [[True, True, True]]


def test_placements_that_nothing_can_be_computed_from_are_refused(ranks):
    for messages in ranks("logp:refusals", 2):
        assert len(messages) == 5
        assert (
            "lm_head.weight lies on a mesh with the axes ('dp',), and its only axis may be 'tp'"
            in messages["weight on dp"]
        )
        assert "register_fsdp_forward_method" in messages["weight on dp"]
        assert "lm_head.weight is placed S(1): it may be Shard(0) or Replicate()" in messages["weight by features"]
        assert "hidden lies on a mesh with the axes ('dp',)" in messages["hidden on dp"]
        assert (
            "hidden is placed S(1): it may be Replicate(), or Shard of a dim before the last"
            in messages["hidden by features"]
        )
        assert "lm_head.bias holds words 0 to 8 of 8 and lm_head.weight" in messages["whole bias"]
