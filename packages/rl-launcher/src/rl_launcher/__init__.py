"""Compose the packages of RL Stack into runs that one command starts."""
