"""Verify: right plans pass with numbers, and each published wrong one is caught with its culprit and its reason."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import transformers
from parallel_plans_cases import published_plans

from rl_parallel_plans import VerifyReport, assert_plan_is_exact, verify
from rl_parallel_plans.__main__ import main
from rl_parallel_plans.errors import PlanError
from rl_parallel_plans.verification.ranks import merged
from rl_parallel_plans.verification.report import judge, judge_collectives
from rl_parallel_plans.verification.tasks import COLLECTIVES, COLLECTIVES_DEEPER, Request, Task

SMALL = {"num_hidden_layers": 4, "hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 2}
RELEASE = tuple(map(int, transformers.__version__.split(".")[:2]))
ONCE = ("forward and backward",)


def llama(**changes):
    return transformers.LlamaConfig(**{**SMALL, **changes})


def qwen3(**changes):
    return transformers.Qwen3Config(**{**SMALL, "head_dim": 16, **changes})


def wrong(report: VerifyReport) -> dict[str, str]:
    """Name of each wrong check to what is said of it."""
    return {check.name: "\n".join(check.culprits) for check in report.checks if check.verdict == "WRONG"}


def run_published(config, plan, *, only=ONCE, **options):
    """A published plan as it is run where nobody checks it."""
    return verify(config, custom=plan, check_first=False, only=only, **options)


# -- Plans that are right ------------------------------------------------------------------------


def test_own_plan_is_exact_in_every_check():
    report = assert_plan_is_exact(qwen3(), tp=2)
    assert report.exit_code == 0
    assert report.error < 1e-5
    names = {check.name for check in report.checks if check.verdict == "ok"}
    assert {
        "fits at full size",
        "wrapped class, same plan",
        "forward and backward: gradients",
        "lm_head ends sharded",
        "gradient norm",
        "clipping",
        "optimizer steps",
        "odd length: logits",
        "left padding: gradients",
        "accumulation x3: gradients",
        "frozen parameters: stay frozen",
        "uneven vocabulary, other tie: log-probabilities",
        "uneven vocabulary, other tie: ties",
        "linear_logp",
        "bf16 clipping",
        "checkpoint round trip",
        "collectives of a layer",
    } <= names
    assert json.loads(report.json())["ok"] is True


def test_pipeline_stages_are_exact_by_every_schedule():
    report = assert_plan_is_exact(qwen3(tie_word_embeddings=True), tp=1, pp=2)
    assert report.layout == "pp=2 x tp=1"
    names = {check.name for check in report.checks if check.verdict == "ok"}
    assert {
        "1F1B: loss",
        "1F1B: gradients",
        "tied parameters stay tied",
        "gradient norm",
        "clipping",
        "optimizer steps",
        "GPipe, odd length: gradients",
        "interleaved 1F1B: gradients",
        "left padding: logits",
        "frozen parameters: stay frozen",
        "uneven vocabulary, other tie: gradients",
        "linear_logp: gradients",
    } <= names


PIPELINES = {
    "gemma3": lambda: transformers.Gemma3TextConfig(**{**SMALL, "head_dim": 16}),
    "phi3": lambda: transformers.Phi3Config(**SMALL, pad_token_id=None),  # fused rows in an order of their own
    "opt": lambda: transformers.OPTConfig(  # parameters that no style names, and layers on the whole sequence
        vocab_size=128,
        hidden_size=128,
        ffn_dim=128,
        num_hidden_layers=4,
        num_attention_heads=8,
        word_embed_proj_dim=128,
        max_position_embeddings=64,
        dropout=0.0,
    ),
}


@pytest.mark.parametrize(
    "architecture", ["phi3", *(pytest.param(each, marks=pytest.mark.slow) for each in ("gemma3", "opt"))]
)
def test_pipeline_stages_of_tensor_parallel_ranks_are_exact(architecture):
    report = verify(
        PIPELINES[architecture](),
        tp=2,
        pp=2,
        sequence_parallel=True,
        only=("1F1B", "uneven vocabulary, other tie"),
    )
    assert report.ok, report.text()


def test_models_that_no_pipeline_computes_are_refused():
    report = verify("zamba2", tp=1, pp=2)
    assert report.exit_code == 2
    assert "is given, beside the hidden states, what was computed from model.embed_tokens" in report.refused
    assert "a pipeline shards, sums and clips by itself" in verify(qwen3(), pp=2, clip=len).refused


def test_gradients_that_two_stages_have_not_summed_are_wrong_and_named():
    row = {"error": 0.4, "noise": 0.0, "spread": 0.0, "ratio": 0.8, "diagnosis": "its copies have the rest of it"}
    of_rank = {"expected": ["embed", "lost"], "first_names": {"head": "embed", "embed": "embed"}, "thawed": []}
    shared = {"logits": 0.0, "logits_noise": 0.0, "loss": 1.0, "true_loss": 1.1, **of_rank}
    facts = merged(
        [{**shared, "rows": [{"name": name, **row}], "held": [name]} for name in ("embed", "head")],
    )
    task = Task(name="1F1B")
    request = Request(configs={}, tp=1, dp=1, pp=2, tasks=(task,))
    checks = {check.name: check for check in judge(request, {"1F1B": facts})}
    assert checks["1F1B: logits"].verdict == "ok"
    assert checks["1F1B: loss"].verdict == checks["1F1B: gradients"].verdict == "WRONG"
    said = "\n".join(checks["1F1B: gradients"].culprits)
    assert "head (1): error 4.0e-01, norm 0.80 of the true one, ranks agree; its copies have the rest of it" in said
    assert "lost: it is not there after sharding" in said


def test_own_plan_with_sequence_parallelism_under_fsdp_is_exact():
    report = verify(
        qwen3(tie_word_embeddings=True),
        tp=2,
        dp=2,
        sequence_parallel=True,
        only=("forward and backward", "odd length", "accumulation x3, deferred sync"),
    )
    assert report.ok, report.text()
    assert {check.name: check.verdict for check in report.checks}["tied parameters stay tied"] == "ok"


def test_mixture_of_experts_is_compared_far_from_ties():
    config = transformers.Qwen3MoeConfig(**SMALL, head_dim=16, num_experts=8, num_experts_per_tok=4)
    assert_plan_is_exact(config, tp=2, only=ONCE)


@pytest.mark.skipif(RELEASE < (5, 0), reason="the default configuration of this model does not run before 5.0")
def test_vision_language_model_is_verified_with_an_image():
    config = transformers.CONFIG_MAPPING["qwen2_5_vl"]()
    report = verify(config, only=("forward and backward", "with an image"), full_size=False)
    assert report.ok, report.text()
    assert {check.name: check.verdict for check in report.checks}["with an image: gradients"] == "ok"


@pytest.mark.slow
def test_layers_compile_without_a_graph_break_and_with_the_same_gradients():
    report = verify(qwen3(), sequence_parallel=True, compile="aot_eager", only=("bf16 clipping",), full_size=False)
    checks = {check.name: check for check in report.checks}
    assert report.ok, report.text()
    assert checks["layers compiled with aot_eager: gradients"].error < 1e-5
    assert checks["layers compiled with aot_eager: graph breaks"].detail == "0 breaks, 2 graphs"


@pytest.mark.slow
def test_graph_break_is_named():
    found = wrong(verify(qwen3(), apply=published_plans.with_a_graph_break, compile="aot_eager", only=ONCE))
    assert "graph break" in found["layers compiled with aot_eager: graph breaks"]


@pytest.mark.parametrize(
    "config", [transformers.Phi3Config(**SMALL, pad_token_id=None), qwen3()], ids=["phi3", "qwen3"]
)
def test_weights_that_a_checkpoint_would_change_are_named(config):
    found = wrong(verify(config, apply=published_plans.rows_in_an_order_of_their_own, only=("checkpoint round trip",)))[
        "checkpoint round trip"
    ]
    assert "full state dict: 2 differ, model.layers.*.mlp.down_proj.weight: other numbers" in found
    assert "distributed checkpoint, into the unsharded model: 2 differ" in found


# -- What was not compared -----------------------------------------------------------------------


def test_configuration_that_transformers_cannot_build_is_skipped_and_the_small_one_verified():
    report = verify(llama(vocab_size=131, pad_token_id=151329), only=ONCE)
    check = next(check for check in report.checks if check.name == "fits at full size")
    assert check.verdict == "skipped"
    assert "cannot be built by transformers" in check.detail
    assert report.exit_code == 0, report.text()


def test_model_that_cannot_be_built_small_either_is_skipped_and_no_plan_is_blamed():
    report = verify(llama(num_attention_heads=8, num_key_value_heads=2, hidden_act="no such activation"), only=ONCE)
    assert report.unusable
    assert report.exit_code == 2
    assert "SKIPPED: LlamaConfig" in report.text()


def test_parameters_that_the_model_never_trains_are_not_told_to_have_thawed():
    config = transformers.CONFIG_MAPPING["afmoe"]() if RELEASE >= (5, 0) else pytest.skip("no such model before 5.0")
    report = verify(config, only=("frozen parameters",), full_size=False)
    assert report.ok, report.text()


def test_layer_that_communicates_nothing_is_a_note():
    nothing = {"forward": {}, "backward": {}}
    predicted = {"as given": {**nothing, "unknown": []}, "deeper": {**nothing, "unknown": []}}
    facts = {COLLECTIVES: nothing, COLLECTIVES_DEEPER: nothing}
    (check,) = judge_collectives({"facts": facts, "predicted": predicted})
    assert (check.verdict, check.detail) == ("note", "forward none; backward none: nothing to compare")


def test_layers_that_run_in_cycles_may_communicate_as_often_as_they_run():
    predicted = {
        "as given": {"forward": {"all_reduce": 4}, "backward": {"all_reduce": 4}, "unknown": []},
        "deeper": {"forward": {"all_reduce": 6}, "backward": {"all_reduce": 6}, "unknown": []},
    }
    runs = {"forward": 6, "backward": 3}
    less = {"forward": {"all_reduce": 24}, "backward": {"all_reduce": 12}, "runs": runs}
    more = {"forward": {"all_reduce": 36}, "backward": {"all_reduce": 18}, "runs": runs}
    (check,) = judge_collectives({"facts": {COLLECTIVES: less, COLLECTIVES_DEEPER: more}, "predicted": predicted})
    assert check.verdict == "ok"
    assert "a layer runs 6 times forward, 3 of them with a gradient" in check.detail
    facts = {COLLECTIVES: {**less, "runs": {}}, COLLECTIVES_DEEPER: {**more, "runs": {}}}
    assert judge_collectives({"facts": facts, "predicted": predicted})[0].verdict == "WRONG"


@pytest.mark.parametrize(
    ("check", "facts"),
    [
        ("forward and backward: gradients", {"rows": []}),
        ("forward and backward: stay frozen", {"frozen": 0}),
        ("gradients lie where parameters lie", {"placed_gradients": 0}),
        ("optimizer steps", {"weights": []}),
    ],
)
def test_check_that_compared_nothing_is_a_note_and_not_ok(check, facts):
    row = {"name": "w", "error": 0.0, "noise": 0.0, "ratio": 1.0, "spread": 0.0, "diagnosis": ""}
    something = {
        "logits": 0.0,
        "logits_noise": 0.0,
        "rows": [row],
        "absent": [],
        "thawed": [],
        "frozen": 1,
        "placed": "vocabulary",
        "shape": [[1], [1]],
        "misplaced": {},
        "placed_gradients": 1,
        "ties": [],
        "tied": True,
        "drift": [],
        "weights": [("w", 0.0)],
    }
    task = Task(name="forward and backward", freeze=True, optimize=True)
    request = Request(configs={}, tp=2, dp=1, tasks=(task,))
    for found, verdict in ((something, "ok"), ({**something, **facts}, "note")):
        verdicts = {each.name: each.verdict for each in judge(request, {task.name: found})}
        assert verdicts[check] == verdict


# -- Published plans that are wrong --------------------------------------------------------------


@pytest.mark.parametrize("config", [qwen3(), transformers.Gemma3TextConfig(**SMALL)], ids=["qwen3", "gemma3"])
def test_head_norms_left_plain_are_one_term_of_a_sum(config):
    said = wrong(run_published(config, published_plans.head_norms_left_plain))["forward and backward: gradients"]
    for name in ("q_norm", "k_norm"):
        (line,) = [line for line in said.splitlines() if name in line]
        assert "ranks disagree; each rank holds one term of a sum over tp" in line
        assert "replicated_with_grad_allreduce" in line
    assert "q_proj" not in said


def test_plan_with_a_known_problem_is_refused_before_it_runs():
    report = verify(qwen3(), custom=published_plans.head_norms_left_plain, only=ONCE)
    assert report.exit_code == 2
    assert not report.ok
    assert "q_norm would see only its rank's heads" in report.refused
    with pytest.raises(AssertionError, match="REFUSED"):
        assert_plan_is_exact(qwen3(), custom=published_plans.head_norms_left_plain, only=ONCE)


def test_gradients_that_every_backward_reduces_again():
    found = wrong(
        run_published(
            qwen3(), published_plans.gradients_reduced_again, only=("forward and backward", "accumulation x3")
        )
    )
    assert "forward and backward: gradients" not in found  # right after one backward
    said = found["accumulation x3: gradients"]
    assert all(name in said for name in ("q_norm", "k_norm"))
    assert said.count("summed over tp again by each backward") == 2


@pytest.mark.parametrize("plan", [published_plans.one_end_of_the_tie, published_plans.both_ends_of_the_tie])
def test_tied_embeddings_that_are_parted(plan):
    found = wrong(run_published(llama(tie_word_embeddings=True), plan))
    assert "were one parameter and are not any more" in found["tied parameters stay tied"]
    assert "the rest of it lies at lm_head.weight" in found["forward and backward: gradients"]


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (published_plans.gathered_lm_head, "every rank holds the logits of all words"),
        (published_plans.local_lm_head, "a plain slice of the vocabulary"),
    ],
)
def test_lm_head_that_does_not_end_sharded(plan, said):
    found = wrong(run_published(llama(), plan))
    assert said in found["lm_head ends sharded"]
    assert "forward and backward: gradients" not in found


def test_registry_keyed_by_the_class_object():
    found = wrong(run_published(llama(), published_plans.keyed_by_class))
    assert "must get the same plan" in found["wrapped class, same plan"]
    assert "lm_head" in found["wrapped class, same plan"]


def test_gradient_that_every_rank_had_already_is_summed():
    said = wrong(run_published(llama(), published_plans.summed_twice))["forward and backward: gradients"]
    assert "input_layernorm" in said
    assert "2 times too large: summed over tp although each rank held all of it" in said


def test_vocabulary_interval_that_disagrees_with_uneven_shards():
    found = wrong(verify(llama(), logp=published_plans.floored_vocabulary_logp, only=("uneven vocabulary, other tie",)))
    said = found["uneven vocabulary, other tie: log-probabilities"]
    assert "of the tokens are wrong" in said
    assert "ceil(V / tp)" in said


def test_norm_that_counts_every_copy():
    config = llama(tie_word_embeddings=True)
    report = run_published(config, published_plans.layers_alone, grad_norm=published_plans.norm_counting_every_copy)
    check = {check.name: check for check in report.checks}["gradient norm"]
    assert check.verdict == "WRONG"
    assert check.error > 0.1
    assert "counted once for each of them" in check.culprits[0]


def test_clipping_that_scales_a_copy_of_bf16_gradients():
    found = wrong(verify(llama(), clip=published_plans.clip_of_a_copy, only=("bf16 clipping",)))
    assert "by 1.000 and not by 0.500: it scaled a copy" in found["bf16 clipping"]


def test_sequence_parallel_plan_that_breaks_on_odd_lengths():
    report = verify(
        llama(), apply=published_plans.sequence_parallel_of_local_pieces, only=("forward and backward", "odd length")
    )
    found = wrong(report)
    assert "forward and backward: logits" not in found
    assert found["odd length"].startswith("rank ")
    if RELEASE >= (5, 0):  # it breaks on even ones too before
        assert "Partial" in found["gradients lie where parameters lie"]


def test_gradient_averaged_over_data_parallel_ranks():
    report = verify(llama(), tp=1, dp=2, apply=published_plans.averaged_over_data_parallel_ranks, only=ONCE)
    assert "averaged over dp and not summed" in wrong(report)["forward and backward: gradients"]


def test_linear_logp_of_a_wrong_model_is_wrong():
    found = wrong(verify(llama(), apply=published_plans.scaled_up_projection, only=("linear_logp",), full_size=False))
    assert "of the tokens are wrong" in found["linear_logp"]


def test_first_module_with_a_wrong_output_is_named():
    found = wrong(verify(llama(), apply=published_plans.scaled_up_projection, only=ONCE))
    assert "forward and backward: logits" in found
    assert found["where it begins"] == "model.layers.1.mlp: the first wrong output"


# -- Processes -----------------------------------------------------------------------------------


def test_abort_of_a_rank_is_reported_and_the_next_task_runs():
    report = verify(llama(), apply=published_plans.aborts_on_rank_one, only=("forward and backward", "bf16 clipping"))
    assert "rank 1 was ended by signal SIGABRT" in wrong(report)["forward and backward"]
    assert {check.name: check.verdict for check in report.checks}["bf16 clipping"] == "ok"


def test_ranks_that_wait_for_one_another_are_ended():
    report = verify(llama(), apply=published_plans.hangs_on_rank_one, only=ONCE, deadline_s=3)
    assert "no rank made progress for 3 s" in wrong(report)["forward and backward"] or "rank" in report.text()


def test_mistake_in_a_plan_is_reported_with_its_place():
    said = wrong(run_published(llama(), published_plans.forgotten_down_proj))["forward and backward"]
    assert "mat1 and mat2 shapes cannot be multiplied" in said
    assert "modeling_llama.py" in said


def test_function_of_the_running_script_is_refused():
    def plan(_model):
        return {}

    plan.__module__, plan.__qualname__ = "__main__", "plan"
    with pytest.raises(PlanError, match=r"plan lies in the running script.*put it into a module"):
        verify(llama(), custom=plan, only=ONCE)


def test_function_that_cannot_be_sent_is_refused():
    with pytest.raises(PlanError, match="must be importable there"):
        verify(llama(), custom=lambda _model: {}, only=ONCE)


@pytest.mark.slow
def test_script_without_a_main_guard_verifies_a_plan_beside_it(tmp_path):
    (tmp_path / "my_plans.py").write_text("def plan(model):\n    raise KeyError('no such layer')\n")
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import my_plans
        from rl_parallel_plans import verify

        report = verify("llama", custom=my_plans.plan)
        print(report.text())
        """)
    )
    result = run_python(script)
    assert "KeyError: 'no such layer'" in result.stdout
    assert result.returncode == 0, result.stderr


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="counts processes in /proc")
def test_nothing_is_left_running_when_the_caller_is_killed(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from parallel_plans_cases import published_plans\nfrom rl_parallel_plans import verify\n"
        "verify('llama', apply=published_plans.hangs_on_rank_one, full_size=False)\n"
    )
    caller = subprocess.Popen([sys.executable, script], env=environment(), stdin=subprocess.DEVNULL)
    wait_until(lambda: len(descendants(caller.pid)) >= 4)  # server, session, two ranks
    below = descendants(caller.pid)
    caller.send_signal(signal.SIGKILL)
    caller.wait()
    wait_until(lambda: not any(is_running(pid) for pid in below))


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ([], 0),
        (["--apply", "parallel_plans_cases.published_plans:scaled_up_projection"], 1),
        (["--plan", "parallel_plans_cases.published_plans:gathered_lm_head"], 2),
    ],
)
def test_command_exits_with_the_verdict(tmp_path, capsys, arguments, code):
    llama().save_pretrained(tmp_path)
    assert main(["verify", str(tmp_path), "--only", "forward and backward", "--json", *arguments]) == code
    assert json.loads(capsys.readouterr().out)["ok"] is (code == 0)


def test_command_refuses_what_is_not_there(tmp_path, capsys):
    assert main(["verify", str(tmp_path / "nothing")]) == 2
    assert "does not exist" in capsys.readouterr().err


@pytest.mark.slow
def test_parity_table_has_every_layout(tmp_path, capsys):
    llama().save_pretrained(tmp_path)
    assert main(["parity", str(tmp_path), "--json", "--write", str(tmp_path / "PARITY.md")]) == 0
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert len(row["cells"]) == 6
    assert all(cell["gradients"] < 1e-5 for cell in row["cells"])
    assert f"| {tmp_path} | " in (tmp_path / "PARITY.md").read_text()


def test_task_that_is_not_there_is_refused():
    report = verify(llama(), only=("backward and forward",))
    assert "['backward and forward'] are no tasks at tp=2, dp=1" in report.refused


def test_model_of_nothing_is_refused():
    with pytest.raises(PlanError, match="pass a name, a path, a configuration or a model"):
        verify(object())


def run_python(*arguments):
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment())


def environment():
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "HF_HUB_OFFLINE": "1"}


def descendants(pid):
    found, fringe = [], [pid]
    while fringe:
        parent = fringe.pop()
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                children = list(map(int, task.read_text().split()))
            except OSError:
                continue
            found += children
            fringe += children
    return found


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until(condition, timeout_s=300):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
