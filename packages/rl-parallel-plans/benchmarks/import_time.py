"""What `import rl_parallel_plans` costs over `import torch`, and what others pay who import model classes eagerly.

Fresh interpreters in turn, the fastest of each. Ends with one line of JSON.
"""

import importlib.util
import json
import subprocess
import sys
import time

ROUNDS = 3
STATEMENTS = {
    "torch": "import torch",
    "rl_parallel_plans": "import torch, rl_parallel_plans",
    "with DTensor and FSDP2": "import torch, torch.distributed.tensor.parallel, torch.distributed.fsdp",
    "with a model class": "import torch, transformers.models.llama.modeling_llama",
}


def seconds(statement):
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True, stderr=subprocess.DEVNULL)
    return time.perf_counter() - start


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
    print(json.dumps({"ratio_to_torch": ratios, "rounds": ROUNDS}))


if __name__ == "__main__":
    main()
