"""Supervised fine-tuning against a plain Hugging Face loop sorted by length, and against TRL's SFTTrainer.

Same model, same rows, same AdamW and clipping, in one process, one after the other in every round, in changing order.
A round is one epoch over the rows, in optimizer steps of 64 rows:

* `sorted`: rows sorted by length, microbatches padded to their longest, labels and Hugging Face's own loss;
* `trl`: SFTTrainer on tokenized rows, as large microbatches grouped by length, no gradient checkpointing, no logging;
* `padded` and `packed`: this backend, cut by rows or by tokens.

    python benchmarks/against_sft.py [--rounds 5]

The last line is JSON with every figure, as multiples of the CPU seconds of this backend, and whether the bars hold:
against the faster of the two, packed at least 1.6 times as fast on ragged rows, and the better layout 1.05 times on
even ones. It needs `trl`.
"""

import argparse
import copy
import json
import statistics
import tempfile
import time
from collections.abc import Callable

import datasets
import tokenizers
import torch
import transformers
import trl
from workloads import MODELS, Examples, Model, make_examples, mean_loss

from rl_backends import DTensorBackend, DTensorConfig, OptimizerConfig

SHAPES = {"even": (20, 20), "ragged": (8, 96)}
MICROBATCH = {"even": 64, "ragged": 16}  # rows; what serves the two others best
PACK = 2048  # tokens; what serves this backend best
EVEN_BAR, RAGGED_BAR = 1.05, 1.6
ROWS, STEPS, LR = 64, 4, 1e-4


def rows_of(examples: Examples) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Token ids and labels of each row, without padding."""
    lengths = examples.lengths.tolist()
    labels = examples.tokens.where(examples.trainable, -100)
    return [(examples.tokens[n, :length], labels[n, :length]) for n, length in enumerate(lengths)]


def sorted_loop(model: torch.nn.Module, batches: list[Examples], microbatch: int) -> Callable[[], None]:
    """What one writes by hand, with microbatches of rows of like lengths."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, fused=True)

    def epoch() -> None:
        for examples in batches:
            ordered = sorted(rows_of(examples), key=lambda row: len(row[0]))
            count = examples.trainable[:, 1:].sum()
            for first in range(0, len(ordered), microbatch):
                tokens, labels = zip(*ordered[first : first + microbatch], strict=True)
                pad = torch.nn.utils.rnn.pad_sequence
                mask = pad([torch.ones_like(row) for row in tokens], batch_first=True)
                model(
                    input_ids=pad(tokens, batch_first=True),
                    attention_mask=mask,
                    labels=pad(labels, batch_first=True, padding_value=-100),
                    num_items_in_batch=count,
                    use_cache=False,
                ).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return epoch


def sft_trainer(model: torch.nn.Module, batches: list[Examples], microbatch: int, folder: str) -> Callable[[], None]:
    """TRL's trainer over the same rows, as fast as its arguments make it on a CPU."""
    rows = [row for examples in batches for row in rows_of(examples)]
    table = {"input_ids": [ids.tolist() for ids, _ in rows], "labels": [labels.tolist() for _, labels in rows]}
    arguments = trl.SFTConfig(
        output_dir=folder,
        per_device_train_batch_size=microbatch,
        gradient_accumulation_steps=ROWS // microbatch,
        num_train_epochs=1,
        learning_rate=LR,
        weight_decay=0.0,
        max_grad_norm=1.0,
        lr_scheduler_type="constant",
        train_sampling_strategy="group_by_length",
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = trl.SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=datasets.Dataset.from_dict(table),
        processing_class=plain_tokenizer(),
    )
    trainer.pop_callback(transformers.PrinterCallback)
    return trainer.train


def plain_tokenizer() -> transformers.PreTrainedTokenizerBase:
    """TRL wants one to pad with."""
    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def backend(model: torch.nn.Module, batches: list[Examples], config: DTensorConfig) -> Callable[[], None]:
    """This package."""
    ours = DTensorBackend(model, config)
    ours.start_training(OptimizerConfig(lr=LR), num_steps=10_000)

    def epoch() -> None:
        for examples in batches:
            ours.forward_backward(examples, mean_loss(examples))
            ours.optim_step()

    return epoch


def measure(model: Model, shape: str, rounds: int) -> dict[str, float]:
    """Median CPU seconds of an epoch of each way."""
    torch.manual_seed(0)
    made = model.make().eval()
    (shortest, longest), microbatch = SHAPES[shape], MICROBATCH[shape]
    batches = [make_examples(model.vocabulary, rows=ROWS, shortest=shortest, longest=longest) for _ in range(STEPS)]
    with tempfile.TemporaryDirectory() as folder:
        ways = {
            "sorted": sorted_loop(copy.deepcopy(made), batches, microbatch),
            "trl": sft_trainer(copy.deepcopy(made), batches, microbatch, folder),
            "padded": backend(copy.deepcopy(made), batches, DTensorConfig(micro_batch_size=microbatch)),
            "packed": backend(
                copy.deepcopy(made), batches, DTensorConfig(micro_batch_tokens=PACK, sequence_packing=True)
            ),
        }
        found: dict[str, list[float]] = {name: [] for name in ways}
        names = list(ways)
        for number in range(rounds + 1):  # the first warms up
            for name in [*names[number % len(names) :], *names[: number % len(names)]]:
                begun = time.process_time()
                ways[name]()
                found[name].append(time.process_time() - begun)
    return {name: statistics.median(each[1:]) for name, each in found.items()}


def main() -> None:
    """Measure, print a table and the figures."""
    parser = argparse.ArgumentParser(description="supervised fine-tuning against a plain loop and TRL")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", type=int, default=2, help="how many of the models, smallest first")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    figures: dict[str, object] = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "trl": trl.__version__,
    }
    bars: dict[str, bool] = {}
    for name, model in list(MODELS.items())[: chosen.models]:
        for shape in SHAPES:
            cpu_s = measure(model, shape, chosen.rounds)
            ratios = {
                f"{theirs}/{ours}": cpu_s[theirs] / cpu_s[ours]
                for ours in ("padded", "packed")
                for theirs in ("sorted", "trl")
            }
            packed = min(ratios["sorted/packed"], ratios["trl/packed"])
            padded = min(ratios["sorted/padded"], ratios["trl/padded"])
            bars[f"{name}, {shape}"] = packed >= RAGGED_BAR if shape == "ragged" else max(packed, padded) >= EVEN_BAR
            figures[f"{name}, {shape}"] = {"cpu_s": cpu_s, **ratios}
            print(f"{name:<32} {shape:<8}", *(f"{key} {value:.2f} x" for key, value in ratios.items()), flush=True)
    print(json.dumps({**figures, "bars": bars, "ok": all(bars.values())}))


if __name__ == "__main__":
    main()
