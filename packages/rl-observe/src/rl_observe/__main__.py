"""`python -m rl_observe`: the same as the command `rl-observe`."""

from rl_observe.cli import main

if __name__ == "__main__":
    main()
