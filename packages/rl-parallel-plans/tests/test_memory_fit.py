"""Whether a step fits a GPU: sizes by name and by bytes, and the smallest change, against a model of memory by hand."""

import json

import pytest
from parallel_plans_cases.models import tiny_on_meta

from rl_parallel_plans import PlanError
from rl_parallel_plans.__main__ import main
from rl_parallel_plans.forecast.fit import GIB, GPUS, fit, gpu_bytes, reserve
from rl_parallel_plans.forecast.memory import memory
from rl_parallel_plans.forecast.options import MemoryOptions
from rl_parallel_plans.forecast.report import report_from_dict

STEP = {"batch_size": 8, "sequence_length": 48}
LASTING = 16


def by_hand(options):
    """GiB of a step: what lasts, then activations and logits a row."""
    activations = {None: 4, "selective": 2, "full": 1}[options.activation_checkpointing]
    logits = {"gathered": 3, "one_piece": 2, "sharded": 1, "linear_logp": 0}[options.lm_head]
    if options.sequence_parallel:
        activations /= 2
    copies = LASTING / 8 if options.optimizer == "adamw" else 0
    lasting = LASTING / options.dp / options.tp
    return int((lasting + copies + (activations + logits) * options.batch_size / options.tp) * GIB)


def fitted(gpu, **changes):
    predicted = []

    def predict(options):
        predicted.append(options)
        return by_hand(options)

    options = MemoryOptions(**{**STEP, **changes})
    lasting = int(LASTING / options.dp / options.tp * GIB)
    return fit(options, gpu, peak=by_hand(options), lasting=lasting, predict=predict), predicted


@pytest.mark.parametrize(
    ("gpu", "gib"),
    [
        ("h100-80gb", 79.1),
        ("H100", 79.1),
        ("NVIDIA H100 80GB HBM3", 79.1),
        ("NVIDIA A100-SXM4-40GB", 39.3),
        ("NVIDIA GeForce RTX 4090", 23.5),
        ("75GiB", 75),
        ("75 gib", 75),
        ("80GB", 80e9 / GIB),
        (85_899_345_920, 80),
        ("85_899_345_920", 80),
    ],
)
def test_a_gpu_is_a_name_or_a_number_of_bytes(gpu, gib):
    assert gpu_bytes(gpu) == int(gib * GIB)


@pytest.mark.parametrize(
    ("gpu", "message"),
    [
        ("a100", "of which there are several: say a100-40gb or a100-80gb"),
        ("h1000", "'h1000' is not known .the nearest: h100-80gb"),
        ("80", "80 bytes: give bytes, or a number with a unit"),
    ],
)
def test_a_gpu_that_is_no_one_size_is_refused(gpu, message):
    with pytest.raises(PlanError, match=message):
        gpu_bytes(gpu)


def test_every_named_gpu_has_less_than_its_name_says():
    for name, gib in GPUS.items():
        nominal = float(name.rpartition("-")[2].removesuffix("gb"))
        assert 0.85 * nominal < gib * GIB / 1e9 <= 1.08 * nominal
        assert gpu_bytes(name) == int(gib * GIB)


def test_a_step_fits_only_where_what_is_not_counted_has_room_as_well():
    peak = by_hand(MemoryOptions(**STEP))
    enough = peak + reserve(peak)
    assert fitted(enough)[0].fits
    assert not fitted(enough - 1)[0].fits
    assert fitted(enough)[1] == []
    assert reserve(peak) > 2 * GIB


@pytest.mark.parametrize(
    ("gib", "options", "change"),
    [
        (78, {"lm_head": "gathered"}, {"lm_head": "linear_logp"}),
        (52, {"lm_head": "gathered"}, {"batch_size": 4}),
        (53, {}, {"optimizer": "adamw_fused"}),
        (40, {}, {"activation_checkpointing": "selective"}),
        (31, {}, {"activation_checkpointing": "full"}),
        (25, {"tp": 2}, {"sequence_parallel": True}),
        (40, {"activation_checkpointing": "full", "batch_size": 20}, {"optimizer": "adamw_fused"}),
        (35, {"activation_checkpointing": "full", "batch_size": 20}, {"batch_size": 10}),
    ],
)
def test_one_option_is_changed_where_one_is_enough_and_the_cheapest(gib, options, change):
    answer, predicted = fitted(f"{gib}GiB", **options)
    assert not answer.fits
    assert answer.change == change
    assert answer.peak == by_hand(MemoryOptions(**{**STEP, **options, **change}))
    assert answer.tried == len(predicted)


def test_of_several_changes_none_can_be_left_out():
    answer, _ = fitted("22.5GiB")
    assert answer.change == {"optimizer": "adamw_fused", "activation_checkpointing": "full", "batch_size": 2}
    for name in answer.change:
        fewer = {other: value for other, value in answer.change.items() if other != name}
        peak = by_hand(MemoryOptions(**{**STEP, **fewer}))
        assert peak + reserve(peak) > 22.5 * GIB


def test_what_lasts_is_shared_by_more_ranks_and_nothing_else_is_tried():
    answer, predicted = fitted("16GiB")
    assert answer.change["dp"] == 2
    assert all(options.dp > 1 or options.tp > 1 for options in predicted)


def test_what_no_change_makes_fit_says_so_with_the_least_that_was_found():
    answer, predicted = fitted("3GiB")
    assert (answer.fits, answer.change) == (False, None)
    assert f"no change that was tried does ({len(predicted)})" in answer.text()
    assert answer.peak == min(map(by_hand, predicted))


def test_options_that_the_model_refuses_are_no_choice():
    def predict(options):
        if options.sequence_parallel:
            raise PlanError("no sequence parallelism")
        return by_hand(options)

    options = MemoryOptions(**STEP, tp=2, optimizer="adamw_fused")
    peak = by_hand(options)
    found = fit(options, int(20 * GIB), peak=peak, lasting=int(8 * GIB), predict=predict)
    assert found.change == {"activation_checkpointing": "selective"}


def test_a_prediction_of_a_model_answers_for_a_gpu():
    model = tiny_on_meta("llama", vocab_size=4000)
    options = {"tp": 2, "batch_size": 4, "sequence_length": 48}
    assert memory(model, **options).fit is None
    report = memory(model, **options, gpu="t4")
    assert report.fit.fits
    assert report.text().startswith("fits t4 (14.5 GiB, 2.0 of them kept for what is not counted): the peak is ")
    assert report_from_dict(json.loads(report.json())) == report


def test_the_command_answers_for_a_gpu_and_compares_ways_of_reading_the_lm_head(tmp_path, capsys):
    tiny_on_meta("llama", vocab_size=4000).config.save_pretrained(tmp_path)
    arguments = ["memory", str(tmp_path), "--tp", "2", "--batch-size", "4", "--sequence-length", "48"]
    assert main([*arguments, "--gpu", "2.2GiB"]) == 0
    assert capsys.readouterr().out.startswith("fits 2.2GiB")
    assert main([*arguments, "--gpu", "2GiB", "--compare"]) == 1
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.endswith("2GiB")
    assert [row.split()[0] for row in rows[:4]] == ["gathered", "one_piece", "sharded", "linear_logp"]
    assert all(row.endswith("does not fit") for row in rows[:4])
    assert main([*arguments, "--gpu", "a100", "--json"]) == 2
    assert "say a100-40gb or a100-80gb" in json.loads(capsys.readouterr().out)["refused"]


@pytest.mark.slow
def test_the_command_answers_for_every_rank_of_a_pipeline(tmp_path, capsys):
    """The last rank holds the logits, and alone does not fit."""
    tiny_on_meta("llama", vocab_size=4000).config.save_pretrained(tmp_path)
    arguments = ["memory", str(tmp_path), "--pp", "2", "--batch-size", "16", "--sequence-length", "48"]
    options = {"pp": 2, "lm_head": "one_piece", "batch_size": 16, "sequence_length": 48}
    peaks = [memory(tiny_on_meta("llama", vocab_size=4000), pp_rank=rank, **options).peak.num_bytes for rank in (0, 1)]
    assert peaks[0] < peaks[1]
    between = sum(peaks) // 2
    arguments += ["--lm-head", "one_piece", "--gpu", str(between + reserve(between))]
    assert main(arguments) == 1
    _, first, last = capsys.readouterr().out.splitlines()[:3]
    assert (first.startswith("pipeline rank 0"), first.endswith("  fits")) == (True, True)
    assert (last.startswith("pipeline rank 1"), last.endswith("does not fit")) == (True, True)
    assert main([*arguments, "--gpu", "t4"]) == 0
