"""The commands of `rl-generation`, one module each, and what they share. Importing it loads none of them."""
