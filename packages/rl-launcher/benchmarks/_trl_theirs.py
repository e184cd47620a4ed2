"""The other side of `against_trl.py`: TRL's GRPOTrainer, told to do the same and to do nothing else.

What costs it time without a use here is off: checkpointing of gradients, bfloat16, logging, saving, progress bars. What
it must do stays: `generate` of transformers, and a second forward for the log-probabilities of the sampler's weights,
which `generate` does not keep.
"""

import _trl_job as same
import torch
from _trl_turns import TURNS, Turns, reward
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar
from trl import GRPOConfig, GRPOTrainer

from rl_algorithms.chat import Chat
from rl_algorithms.data import ShuffledBatches
from rl_launcher.recipe_files import load_object


def prompts_of(job: same.Job, tokenizer) -> Dataset:
    """The prompts in the order in which our side takes them, as text that this tokenizer reads as the same tokens."""
    rows = load_object(same.TASKS[job.task].source, wanted="a function that returns a Dataset")().train
    chat = Chat(tokenizer, prompt_format="chat", stop_token_ids=[tokenizer.eos_token_id])
    batches = ShuffledBatches([chat.prompt(row) for row in rows], size=same.PROMPTS, seed=job.seed)
    prompts = [prompt for _ in range(job.batches) for prompt in next(batches)]
    texts = [tokenizer.decode(prompt.tokens) for prompt in prompts]
    if tokenizer(text=texts)["input_ids"] != [list(prompt.tokens) for prompt in prompts]:
        raise SystemExit("the tokenizer reads the prompts as other tokens than ours are")
    return Dataset.from_dict({"prompt": texts, "answer": [prompt.row.answer for prompt in prompts]})


def settings(job: same.Job) -> GRPOConfig:
    """The quickstart's numbers in TRL's words."""
    return GRPOConfig(
        output_dir=job.out,
        seed=job.seed,
        max_steps=job.steps,
        # The batch: 32 prompts, 8 answers each, four steps on a quarter of them each.
        num_generations=same.GROUP,
        per_device_train_batch_size=same.BATCH // same.STEPS_PER_BATCH,
        gradient_accumulation_steps=1,
        steps_per_generation=same.STEPS_PER_BATCH,
        num_iterations=1,
        shuffle_dataset=False,  # shuffled already
        # Answers.
        max_completion_length=same.TASKS[job.task].max_new_tokens,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        # The loss: the mean over the tokens of a step.
        loss_type="bnpo",
        beta=0.0,
        epsilon=same.CLIP_LOW,
        epsilon_high=same.CLIP_HIGH,
        scale_rewards="group",
        # The step.
        learning_rate=same.LEARNING_RATE,
        adam_beta1=same.BETAS[0],
        adam_beta2=same.BETAS[1],
        weight_decay=0.0,
        max_grad_norm=same.MAX_GRAD_NORM,
        lr_scheduler_type="linear",
        warmup_steps=same.WARMUP_STEPS,
        # Nothing else.
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        dataloader_pin_memory=False,
    )


def main() -> None:
    """Train in turns, and leave the weights."""
    job = same.Job.from_arguments()
    torch.set_num_threads(1)
    disable_progress_bar()
    TURNS.append(Turns())
    tokenizer = AutoTokenizer.from_pretrained(job.start)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(job.start, dtype=torch.float32),
        processing_class=tokenizer,
        reward_funcs=reward,
        train_dataset=prompts_of(job, tokenizer),
        args=settings(job),
    )
    trainer.train()
    trainer.save_model(f"{job.out}/model")


if __name__ == "__main__":
    main()
