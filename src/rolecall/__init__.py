"""RL post-training for language models and agents in which every token answers to its role."""

__version__ = "0.1.0"
