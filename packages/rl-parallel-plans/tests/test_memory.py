"""Predictions of memory against what a step really holds, byte for byte, and against arithmetic."""

import json
import sys

import pytest
import torch
import torch.distributed as dist
import transformers
from parallel_plans_cases.memory import LiveBytes
from parallel_plans_cases.models import tiny, tiny_on_meta
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from rl_parallel_plans import PlanError, plan_for
from rl_parallel_plans.__main__ import main
from rl_parallel_plans.forecast.fake import fused_attention
from rl_parallel_plans.forecast.memory import memory
from rl_parallel_plans.forecast.report import memory_table, report_from_dict
from rl_parallel_plans.forecast.tracker import Ledger
from rl_parallel_plans.model_source import build, read_config

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
VOCABULARY = 4000  # so many that linear_logp does not keep the logits of one chunk
STEP = {"batch_size": 4, "sequence_length": 48}
LAYERS = 2
PHASES = ("between steps", "forward", "backward", "optimizer step")


def model_on_meta(architecture="llama", *, attention="eager", vocab_size=VOCABULARY, tied=False):
    model = tiny_on_meta(architecture, vocab_size=vocab_size, tie_word_embeddings=tied)
    model.config._attn_implementation = attention
    return model


def predicted(*, architecture="llama", vocab_size=VOCABULARY, tied=False, **options):
    model = model_on_meta(architecture, vocab_size=vocab_size, tied=tied)
    dtype = options.pop("param_dtype", None)
    return memory(model, **STEP, **options, param_dtype=None if dtype is None else getattr(torch, dtype))


@pytest.mark.parametrize(
    "options",
    [
        *(
            pytest.param(options, marks=pytest.mark.slow)
            for options in (
                {"tp": 2, "dp": 1, "lm_head": "gathered"},
                {"tp": 2, "dp": 1, "lm_head": "linear_logp"},
                {"tp": 2, "dp": 2, "lm_head": "gathered", "activation_checkpointing": "full"},
                {"tp": 2, "dp": 1, "lm_head": "linear_logp", "sequence_parallel": True},
            )
        ),
        {"tp": 2, "dp": 1, "lm_head": "sharded", "sequence_parallel": True, "activation_checkpointing": "full"},
        {"tp": 2, "dp": 1, "lm_head": "linear_logp", "activation_checkpointing": "selective"},
        {"tp": 1, "dp": 2, "lm_head": "linear_logp", "architecture": "qwen3", "tied": True, "vocab_size": 4001},
        pytest.param(
            {"tp": 2, "dp": 1, "lm_head": "sharded", "architecture": "qwen3_moe", "param_dtype": "bfloat16"},
            marks=pytest.mark.skipif(transformers.__version__ < "5", reason="loops over the experts that have tokens"),
        ),
    ],
    ids=lambda options: "-".join(f"{name}={value}" for name, value in options.items()),
)
def test_predicted_bytes_are_those_of_a_real_step(ranks, options):
    real = ranks("memory:truth", options["tp"] * options["dp"], **STEP, **{"vocab_size": VOCABULARY, **options})[0]
    report = predicted(**options)
    assert {name: report.phase(name).num_bytes for name in PHASES} == real


@pytest.mark.parametrize(
    "options",
    [
        {"pp": 2, "tp": 1, "dp": 1, "lm_head": "linear_logp", "schedule": "1f1b", "microbatches": 4},
        *(
            pytest.param(options, marks=pytest.mark.slow)
            for options in (
                {
                    "pp": 2,
                    "tp": 1,
                    "dp": 1,
                    "lm_head": "gathered",
                    "schedule": "gpipe",
                    "microbatches": 3,
                    "tied": True,
                },
                {
                    "pp": 2,
                    "tp": 2,
                    "dp": 1,
                    "lm_head": "linear_logp",
                    "schedule": "1f1b",
                    "microbatches": 2,
                    "sequence_parallel": True,
                    "activation_checkpointing": "full",
                    "param_dtype": "bfloat16",
                },
                {"pp": 2, "tp": 1, "dp": 2, "lm_head": "linear_logp", "schedule": "1f1b", "microbatches": 4},
                {
                    "pp": 2,
                    "tp": 1,
                    "dp": 1,
                    "lm_head": "linear_logp",
                    "schedule": "interleaved_1f1b",
                    "microbatches": 4,
                },
            )
        ),
    ],
    ids=lambda options: "-".join(f"{name}={value}" for name, value in options.items()),
)
def test_predicted_bytes_of_a_pipeline_stage_are_those_of_a_real_step(ranks, options):
    asked = {**STEP, "vocab_size": VOCABULARY, "num_hidden_layers": 4, **options}
    each = options["tp"] * options["dp"]
    real = ranks("memory:pipeline_truth", options["pp"] * each, **asked)
    changes = {name: asked.pop(name) for name in ("vocab_size", "num_hidden_layers")}
    model = tiny_on_meta("llama", **changes, tie_word_embeddings=asked.pop("tied", False))
    model.config._attn_implementation = "eager"
    dtype = asked.pop("param_dtype", None)
    asked["param_dtype"] = None if dtype is None else getattr(torch, dtype)
    for pp_rank in range(options["pp"]):
        report = memory(model, **asked, pp_rank=pp_rank)
        found = {phase.name: phase.num_bytes for phase in report.phases if phase.name in real[0]}
        if TORCH < (2, 15):
            assert found == real[pp_rank * each]
        else:  # the prediction is .8 % above what is measured; why is not known
            for phase, num_bytes in real[pp_rank * each].items():
                assert num_bytes <= found[phase] <= 1.01 * num_bytes, phase


def test_fused_attention_costs_what_the_fused_kernel_of_a_cpu_costs():
    def held():
        query, key, value = (torch.empty(2, heads, 48, 16, requires_grad=True) for heads in (4, 2, 2))
        with LiveBytes() as live:
            output = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        assert output.shape == query.shape
        return live.now()

    real = held()
    with FakeTensorMode(), fused_attention() as calls:
        random_state = 24  # which a GPU's kernel returns too
        assert held() == real + random_state
    assert calls == [(2, 4, 48, 16)]


def test_gathering_the_lm_head_costs_the_whole_logits_when_it_is_done():
    at_head = [
        memory(model_on_meta(), tp=2, dp=2, lm_head=lm_head, **STEP).phase("after the lm_head").num_bytes
        for lm_head in ("gathered", "sharded")
    ]
    bytes_of_bf16_logits = STEP["batch_size"] * STEP["sequence_length"] * VOCABULARY * 2
    assert at_head[0] - at_head[1] == bytes_of_bf16_logits


@pytest.mark.parametrize(
    ("optimizer", "copies", "while_stepping"),
    [("adamw", 3, 1), ("adamw_fused", 3, 0), ("sgd", 1, 0), ("none", 1, None)],
)
def test_what_lasts_is_parameters_and_state(optimizer, copies, while_stepping):
    model = model_on_meta()
    report = memory(model, tp=1, dp=1, optimizer=optimizer, **STEP)
    fp32 = 4 * sum(parameter.numel() for parameter in model.parameters())
    steps = 4 * len(list(model.parameters())) if copies == 3 else 0  # AdamW counts the steps of each parameter
    others = sum(buffer.nbytes for buffer in model.buffers()) + 8 * STEP["batch_size"] * STEP["sequence_length"]
    lasting = report.phase("between steps").num_bytes
    assert lasting == copies * fp32 + steps + others
    if while_stepping is not None:
        assert (
            report.phase("optimizer step").num_bytes - lasting == (1 + while_stepping) * fp32
        )  # gradients, square roots


@pytest.mark.skipif(transformers.__version__.startswith("4."), reason="transformers 4 makes a mask of [S, S] beside it")
def test_flash_attention_holds_no_scores():
    def activations(attention, length):
        model = model_on_meta(attention=attention, vocab_size=128)
        report = memory(model, batch_size=1, sequence_length=length)
        return report.phase("forward").num_bytes - report.phase("between steps").num_bytes

    assert activations("sdpa", 1024) < 2 * activations("sdpa", 512)  # what it gathers of parameters does not grow
    heads, softmax_and_input = 4, 2
    scores = LAYERS * heads * 2 * softmax_and_input * 1024**2
    assert activations("eager", 1024) - activations("sdpa", 1024) > scores


def test_an_optimizer_and_a_loss_of_your_own_are_counted():
    def squared(logits, _):
        return logits.float().square().mean()

    report = memory(
        model_on_meta(),
        **STEP,
        lm_head="gathered",
        loss=squared,
        optimizer=lambda parameters: torch.optim.SGD(parameters, momentum=0.9),
    )
    parameters = report.phase("between steps").by_category["parameters"]
    assert report.phase("between steps").by_category["optimizer state"] == parameters
    assert report.options["loss"].endswith("squared")


def test_a_model_with_weights_is_predicted_as_one_without_and_not_changed():
    model = tiny("llama", vocab_size=VOCABULARY)
    before = {name: parameter.clone() for name, parameter in model.state_dict().items()}
    assert memory(model, tp=2, dp=2, **STEP) == memory(model_on_meta(attention="sdpa"), tp=2, dp=2, **STEP)
    assert all(torch.equal(before[name], parameter) for name, parameter in model.state_dict().items())


def test_a_prediction_leaves_the_process_as_it_was():
    found = functional.scaled_dot_product_attention, torch.UntypedStorage.resize_, sys.excepthook
    memory(tiny_on_meta("llama"), tp=2, dp=2, **STEP)
    assert not dist.is_initialized()
    assert (functional.scaled_dot_product_attention, torch.UntypedStorage.resize_, sys.excepthook) == found


def test_what_dtensor_remembers_of_a_prediction_does_not_reach_real_gradients(ranks, tmp_path):
    assert max(ranks("memory:gradients_after_a_prediction", 2, rendezvous=f"{tmp_path}/rendezvous")) < 1e-5


def test_a_process_with_a_process_group_is_refused(tmp_path):
    on_error = sys.excepthook
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        with pytest.raises(PlanError, match="this process has a process group"):
            memory(tiny_on_meta("llama"), **STEP)
    finally:
        dist.destroy_process_group()
        sys.excepthook = on_error


@pytest.mark.slow
def test_the_command_predicts_a_configuration_in_another_process(tmp_path, capsys):
    model_on_meta().config.save_pretrained(tmp_path)
    arguments = ["memory", str(tmp_path), "--tp", "2", "--dp", "2", "--batch-size", "4", "--sequence-length", "48"]
    assert main([*arguments, "--activation-checkpointing", "full", "--compare", "--json"]) == 0
    reports = [report_from_dict(values) for values in json.loads(capsys.readouterr().out)]
    model = build(read_config(tmp_path))
    for report, lm_head in zip(reports, ("gathered", "one_piece", "sharded", "linear_logp"), strict=True):
        asked = {"tp": 2, "dp": 2, "lm_head": lm_head, "activation_checkpointing": "full", **STEP}
        assert report == memory(model, **asked)
    assert not dist.is_initialized()


@pytest.mark.slow
def test_the_command_predicts_every_rank_of_a_pipeline(tmp_path, capsys):
    model_on_meta(tied=True).config.save_pretrained(tmp_path)
    arguments = ["memory", str(tmp_path), "--pp", "2", "--batch-size", "4", "--sequence-length", "48"]
    assert main([*arguments, "--json"]) == 0
    reports = [report_from_dict(values) for values in json.loads(capsys.readouterr().out)]
    model = build(read_config(tmp_path))
    assert reports == [memory(model, pp=2, pp_rank=rank, **STEP) for rank in range(2)]
    assert "holds stage 1 of 2: model.layers.1, model.norm, lm_head" in "\n".join(reports[1].assumptions)
    assert main([*arguments, "--compare"]) == 2
    assert "one of --compare and --pp" in capsys.readouterr().err


def test_a_plan_that_does_not_fit_is_refused_with_all_its_problems():
    with pytest.raises(PlanError) as expected:
        plan_for(model_on_meta(), tp=3).check(model_on_meta())
    with pytest.raises(PlanError) as refusal:
        memory(model_on_meta(), tp=3, **STEP)
    assert str(refusal.value) == str(expected.value)


def test_the_command_refuses_in_words_and_in_json(capsys):
    assert main(["memory", "llama", "--tp", "0", "--batch-size", "4", "--sequence-length", "48", "--json"]) == 2
    out, err = capsys.readouterr()
    assert json.loads(out) == {"refused": "tp is 0: it must be a whole number, at least 1"}
    assert "tp is 0: it must be a whole number, at least 1" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp": 0}, "tp is 0: it must be a whole number, at least 1"),
        ({"lm_head": "whole"}, "lm_head is 'whole': it must be one of gathered, one_piece, sharded, linear_logp"),
        ({"optimizer": "muon"}, "optimizer is 'muon': it must be a function or one of adamw"),
        ({"activation_checkpointing": "half"}, "activation_checkpointing is 'half': None or one of full, selective"),
        ({"pp": 2, "pp_rank": 2}, "pp_rank is 2: it must be a rank of the pipeline, below pp=2"),
        ({"microbatches": 4}, "microbatches=4 with pp=1"),
        ({"pp": 2, "schedule": "zb"}, "schedule is 'zb': it must be one of gpipe, 1f1b, interleaved_1f1b"),
        ({"pp": 2, "microbatches": 1}, "1f1b cannot run 1 microbatches"),
        ({"pp": 4}, "4 pipeline stages need as many layers"),
        ({"param_dtype": torch.int8}, "param_dtype is torch.int8: it must be a floating-point torch.dtype"),
        ({"loss": lambda logits, _: logits.sum()}, "a loss of your own reads logits"),
    ],
)
def test_options_that_do_not_exist_or_fit_are_refused(options, message):
    with pytest.raises(PlanError, match=message):
        memory(tiny_on_meta("llama"), **{**STEP, **options})


def test_functions_cannot_be_sent_to_another_process(tmp_path):
    with pytest.raises(PlanError, match="optimizer is a type, which another process cannot be given"):
        memory(tmp_path, **STEP, optimizer=torch.optim.SGD)


def test_a_forward_that_looks_at_numbers_is_refused():
    model = tiny_on_meta("llama")
    model.model.norm.register_forward_pre_hook(lambda _, args: None if args[0].sum() > 0 else args)
    with pytest.raises(PlanError, match="depends on the numbers in a tensor"):
        memory(model, **STEP)


def test_a_report_survives_json_and_shows_its_figures():
    report = memory(tiny_on_meta("llama"), tp=2, dp=2, **STEP)
    assert report_from_dict(json.loads(report.json())) == report
    assert all(sum(phase.by_category.values()) == phase.num_bytes for phase in report.phases)
    assert report.peak.num_bytes == max(phase.num_bytes for phase in report.phases)
    text = report.text()
    assert "plan: structure" in text
    assert f"peak: {report.peak.num_bytes / 2**30:.6f} GiB" in text
    with pytest.raises(KeyError, match="no phase 'fwd': the step has between steps, forward"):
        report.phase("fwd")
    rows = memory_table({"one": report, "two": report}).splitlines()
    assert len(rows) == 3
    assert rows[2].endswith("+0.00")


def test_a_ledger_counts_what_lives_and_names_it_late():
    ledger = Ledger()
    kept = ledger.open(10, category="temporaries", owner="a")
    with ledger.phase("work"):
        ledger.resize(ledger.open(5, category="temporaries", owner="b"), 0)
        ledger.open(3, category="activations", owner="c")
        kept.category = "gradients"
    ledger.resize(kept, 0)
    ledger.moment("end")
    peaks = ledger.peaks()
    assert (peaks["work"].total, peaks["work"].by_category) == (15, {"gradients": 10, "temporaries": 5})
    assert (peaks["end"].total, peaks["end"].by_owner) == (3, {("activations", "c"): 3})
