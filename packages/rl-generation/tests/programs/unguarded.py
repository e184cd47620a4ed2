"""A script that makes an engine without `if __name__ == "__main__":`, as its processes see it."""

import multiprocessing
import sys

from rl_generation.errors import EngineOptionError
from rl_generation.vllm.running import check_not_importing_main

try:
    check_not_importing_main()
except EngineOptionError as error:
    sys.exit(f"refused: {error}")

process = multiprocessing.get_context("spawn").Process(target=print)
process.start()
process.join()
print("exit code of the process that imported this script:", process.exitcode)
