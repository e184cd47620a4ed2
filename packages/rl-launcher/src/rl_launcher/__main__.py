"""`python -m rl_launcher`: the command line where no script is installed, as in a rendered job."""

from rl_launcher.cli.app import main

if __name__ == "__main__":
    main()
