"""Rewards that differ between the answers of an untrained model, without an import that takes long."""


def vowels(completions, **columns):
    """How many different vowels an answer has."""
    return [float(len(set(text.lower()) & set("aeiou"))) for text in completions]
