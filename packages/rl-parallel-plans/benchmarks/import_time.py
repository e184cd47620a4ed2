"""What `import rl_parallel_plans` costs over `import torch`, and what others pay who import model classes eagerly.

Fresh interpreters in turn, the least processor time of each, which other work on the machine changes little. Ends with
one line of JSON.
"""

import importlib.util
import json
import resource
import subprocess
import sys

ROUNDS = 5
OURS, BAR = "rl_parallel_plans", 1.05
STATEMENTS = {
    "torch": "import torch",
    "rl_parallel_plans": "import torch, rl_parallel_plans",
    "with DTensor and FSDP2": "import torch, torch.distributed.tensor.parallel, torch.distributed.fsdp",
    "with a model class": "import torch, transformers.models.llama.modeling_llama",
}


def seconds(statement):
    start = processor_seconds()
    subprocess.run([sys.executable, "-c", statement], check=True, stderr=subprocess.DEVNULL)
    return processor_seconds() - start


def processor_seconds():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main():
    statements = dict(STATEMENTS)
    if importlib.util.find_spec("transformers") is None:
        del statements["with a model class"]
    for statement in statements.values():
        seconds(statement)  # what is compiled and read once is no cost of an import
    taken = {name: [] for name in statements}
    for _ in range(ROUNDS):
        for name, statement in statements.items():
            taken[name].append(seconds(statement))
    best = {name: min(times) for name, times in taken.items()}
    ratios = {name: round(fastest / best["torch"], 3) for name, fastest in best.items()}
    for name, fastest in best.items():
        print(f"{name:>24} {fastest:>7.2f} s {ratios[name]:>6.2f} x torch")
    print(json.dumps({"ratio_to_torch": ratios, "rounds": ROUNDS, "bar": BAR, "within_bar": ratios[OURS] <= BAR}))


if __name__ == "__main__":
    main()
