"""The commands of `rl-backends`, one module each, and what they share. Importing it loads none of them."""
