"""Self-play with an exact yardstick: how much a best response would win against a model at Kuhn poker."""

import sys

import torch

from rolecall.policy.load import load
from rolecall.policy.render import render_pair
from rolecall.tasks.kuhn import decisions, exploitability, game_value

HEARD = {"p": "pass", "b": "bet"}


def strategy_of(name):
    """How likely the model bets at each of its decisions, from the log-probs of the two words that are legal."""
    policy, found = load(name), {}
    for player in ("first", "second"):
        for decision in decisions(player):
            _, card, said = decision
            told = [{"role": "user", "content": f"{player} {card}"}]
            # What a player hears is what the other said; its own words are the assistant's.
            for i, letter in enumerate(said):
                mine = ("first", "second")[i % 2] == player
                told.append({"role": "assistant" if mine else "user", "content": HEARD[letter]})
            found[decision] = (
                torch.stack([_logprob(policy, told, word) for word in ("bet", "pass")]).softmax(0)[0].item()
            )
    return found


@torch.no_grad()
def _logprob(policy, told, word):
    whole = render_pair(policy.tokenizer, told, word, stop_ids=policy.stop_ids)
    start, end = whole.turns[-1]
    logits = policy.model(torch.tensor([whole.ids])).logits[0].log_softmax(-1)
    return sum(logits[t - 1, whole.ids[t]] for t in range(start, end))


if __name__ == "__main__":
    for name in sys.argv[1:] or ["tiny"]:
        strategy = strategy_of(name)
        value, loss = game_value(strategy), exploitability(strategy)
        print(f"{name}: value for the first player {value:+.3f} (equilibrium -0.056), exploitability {loss:.3f}")
