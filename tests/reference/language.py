"""What a step of RL on a language model is, written out: plain, slow, in float64, with nothing of rolecall's.

`Reference` takes the settings of a run (config.json), the weights it began with and the records it left, and computes
every number of every step again: the tokens that the random numbers draw, log-probs, values, KL, rewards, advantages,
returns, ratios, each token's share of each loss term, the gradient, AdamW, the KL coefficient. `check` compares.

Lists are indexed like the records: entry t belongs to token t of a row.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from adamw import AdamW
from torch import Tensor

PAD, PROMPT, CONTENT, STOP, OBSERVATION, NO_CHOICE, AFTER_END = range(7)
VERDICT_OF_ROLE = {PROMPT: 2, OBSERVATION: 3, NO_CHOICE: 4, AFTER_END: 7}
TRAINED, STOP_UNTRAINED, BLACKOUT, REWARD_FAILED, OBSERVED = 1, 5, 6, 9, 11
WORD = 2**64


def mix(x: int) -> int:
    """splitmix64."""
    x = (x + 0x9E3779B97F4A7C15) % WORD
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % WORD
    return x ^ (x >> 31)


def uniform(seed: int, step: int, prompt: int, sample: int, position: int) -> float:
    """The random number of one token."""
    key = 0
    for part in (seed, step, prompt, sample):
        key = mix((key + part) % WORD)
    return (mix((key + mix(position)) % WORD) >> 11) * 2.0**-53


def drawn(logprobs: Tensor, u: float, *, edge: float = 1e-4) -> set[int]:
    """The token whose slice of the CDF holds u, and its neighbours if u lies on their edge."""
    ends = logprobs.exp().cumsum(0)
    return {int(torch.searchsorted(ends, min(max(x, 0.0), 1 - 1e-12))) for x in (u - edge, u, u + edge)}


class Reference:
    """Walks through a run, one step at a time."""

    def __init__(
        self,
        config: dict[str, Any],
        model: Any,
        *,
        score: Callable[[dict], float | None],
        number: Callable[[dict], int] = lambda row: row["sample"],
        blackout: Callable[[Sequence[int]], Sequence[bool]] = lambda ids: [False] * len(ids),
    ) -> None:
        """`model` holds the weights before the first step. `score(record)` is the reward; `number(record)` is the number
        that the answer was sampled under."""
        self.config, self.o, self.score, self.number = config, config["algorithm"], score, number
        self.blackout = blackout
        self.model = model.double()
        self.parameters = dict(model.named_parameters())
        if self.o["critic"] == "shared":
            head = torch.zeros(1, model.config.hidden_size, dtype=torch.float64, requires_grad=True)
            self.parameters["value_head.weight"] = head
        self.start = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.optimizer = AdamW(self.parameters, config["optim"])
        self.kl_coef = self.o["kl_coef"]
        self.temperature = config["sampling"]["temperature"]

    # -- the policy --------------------------------------------------------------------------------------------------

    def read(self, texts: Sequence[Sequence[int]]) -> list[tuple[Tensor, Tensor | None]]:
        """([time, vocab] log-probs of every possible token t, [time] values before token t) per text, with gradient."""
        longest = max(map(len, texts))  # attention is causal, so what fills a row up changes nothing before it
        ids = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts])
        out = self.model(ids, output_hidden_states=True, use_cache=False)
        spread = torch.nn.functional.pad((out.logits[:, :-1] / self.temperature).log_softmax(-1), (0, 0, 1, 0))
        head = self.parameters.get("value_head.weight")
        if head is None:
            return [(row, None) for row in spread]
        values = torch.nn.functional.pad(out.hidden_states[-1][:, :-1] @ head[0], (1, 0))
        return list(zip(spread, values, strict=True))

    def before(self, texts: Sequence[Sequence[int]]) -> list[Tensor]:
        """[time, vocab] the same of the policy before the first step."""
        now = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.put(self.start)
        spread = [row.detach() for row, _ in self.read(texts)]
        self.put(now)
        return spread

    def put(self, weights: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(weights[name])

    # -- a rollout ---------------------------------------------------------------------------------------------------

    def eligible(self, roles: Sequence[int]) -> list[bool]:
        return [role == CONTENT or (role == STOP and self.o["train_stop"]) for role in roles]

    def verdicts(self, row: dict, score: float | None) -> list[int]:
        dark = self.blackout(row["ids"])
        found = []
        for role, eligible, hidden in zip(row["roles"], self.eligible(row["roles"]), dark, strict=True):
            if role == STOP and not eligible:
                found.append(STOP_UNTRAINED)
            elif not eligible:
                found.append(VERDICT_OF_ROLE[role])
            else:
                found.append(REWARD_FAILED if score is None else BLACKOUT if hidden else TRAINED)
        return found

    def rollout(self, records: list[dict]) -> list[dict]:
        """Everything that is computed from what was sampled, a dict per answer."""
        texts = [row["ids"] for row in records]
        with torch.no_grad():
            now = self.read(texts)
        frozen = self.before(texts) if self.o["kl_coef"] else [None] * len(texts)
        answers = [self.answer(row, *found, ref) for row, found, ref in zip(records, now, frozen, strict=True)]
        self.advantages(answers)
        return answers

    def answer(self, row: dict, spread: Tensor, values: Tensor | None, frozen: Tensor | None) -> dict[str, Any]:
        ids, eligible = row["ids"], self.eligible(row["roles"])
        places = [t for t, yes in enumerate(eligible) if yes]
        step, prompts = row["step"] - 1, self.config["prompts"]
        for t in places:
            u = uniform(row["seed"], step, row["group"] - step * prompts, self.number(row), t)
            assert ids[t] in drawn(spread[t], u), f"token {t} of group {row['group']} is not the one that was drawn"
        total = self.score(row)
        now = {t: float(spread[t, ids[t]]) for t in places}
        ref = {} if frozen is None else {t: float(frozen[t, ids[t]]) for t in places}
        rewards = [0.0] * len(ids)
        kl = {t: self.kl(now[t] - ref[t]) for t in ref}
        if self.o["kl_in"] == "reward":
            for t in ref:
                rewards[t] -= self.kl_coef * kl[t]
        if total is not None and places:
            rewards[places[-1]] += total
        return {
            "compared": (row["group"], row["agent"]),
            "ids": ids,
            "places": places,
            "total": total,
            "verdicts": self.verdicts(row, total),
            "logprobs": now,
            "ref_logprobs": ref,
            "kl": kl,
            "values": {} if values is None else {t: float(values[t]) for t in places},
            "rewards": rewards,
        }

    def kl(self, x: float) -> float:
        kind = self.o["kl_kind"]
        if kind == "auto":
            kind = "k1" if self.o["kl_in"] == "reward" else "k3"
        return {"k1": x, "clamp": max(x, 0.0), "k2": x * x / 2, "k3": math.exp(-x) - 1 + x, "abs": abs(x)}[kind]

    def trained(self, answer: dict) -> list[int]:
        return [t for t, verdict in enumerate(answer["verdicts"]) if verdict == TRAINED]

    def advantages(self, answers: list[dict]) -> None:
        """Adds `advantages` and, with a critic, `returns`, by position."""
        if self.o["name"] == "grpo":
            for answer in answers:
                mates = [a["total"] for a in answers if a["compared"] == answer["compared"]]
                mates = [x for x in mates if x is not None]
                mean = sum(mates) / len(mates)
                deviation = math.sqrt(sum((x - mean) ** 2 for x in mates) / (len(mates) - 1))
                worth = 0.0 if answer["total"] is None else (answer["total"] - mean) / (deviation + 1e-4)
                answer["advantages"] = dict.fromkeys(answer["places"], worth)
            return
        assert self.o["name"] == "ppo"
        scale = 1.0
        if self.o["whiten_rewards"]:
            held = [a["rewards"][t] for a in answers for t in a["places"] if self.trained(a)]
            mean = sum(held) / len(held)
            scale = 1 / math.sqrt(sum((x - mean) ** 2 for x in held) / len(held) + 1e-8)
            for answer in answers:
                answer["scaled"] = {t: (answer["rewards"][t] - mean) * scale + mean for t in answer["places"]}
        for answer in answers:
            rewards = answer.get("scaled", answer["rewards"])
            raw: dict[int, float] = {}
            later = next_value = 0.0
            for t in reversed(answer["places"]):
                delta = rewards[t] + self.o["gamma"] * next_value - answer["values"][t]
                later = raw[t] = delta + self.o["gamma"] * self.o["lam"] * later
                next_value = answer["values"][t]
            answer["advantages"], answer["returns"] = raw, {t: raw[t] + answer["values"][t] for t in raw}
        counted = [a["advantages"][t] for a in answers for t in self.trained(a)]
        mean = sum(counted) / len(counted)
        deviation = math.sqrt(sum((x - mean) ** 2 for x in counted) / len(counted) + 1e-8)
        for answer in answers:
            answer["advantages"] = {t: (answer["advantages"][t] - mean) / deviation for t in self.trained(answer)}

    # -- an optimiser step -------------------------------------------------------------------------------------------

    def step(self, answers: list[dict], *, done: int) -> tuple[list[dict], float]:
        """One optimiser step on these answers (`replayed` ones have `behaviour`); `done` is the number of steps before.

        Returns, per answer, what the record of the update holds, and the gradient's norm.
        """
        places = [(a, t) for a in answers for t in self.trained(a)]
        fresh = [(a, t) for a, t in places if not a.get("replayed")]
        kept: list[dict] = [{"logprobs": {}, "ratio": {}, "contributions": {}} for _ in answers]
        loss: Any = 0.0
        read = self.read([answer["ids"] for answer in answers])
        for answer, record, (spread, values) in zip(answers, kept, read, strict=True):
            for t in self.trained(answer):
                now = spread[t, answer["ids"][t]]
                old = answer["behaviour"][t] if answer.get("replayed") else answer["old"].get(t, now.item())
                ratio = (now - old).exp()
                share = self.share(answer, answers, len(places))
                terms = {"policy": share * self.policy_loss(answer, t, ratio)}
                if not answer.get("replayed"):
                    terms |= self.other_terms(answer, t, now, spread[t], values, share, len(fresh))
                loss = loss + sum(terms.values())
                record["logprobs"][t], record["ratio"][t] = now.item(), ratio.item()
                record["contributions"][t] = {name: x.item() for name, x in terms.items()}
        return kept, self.optimizer.step(loss, done=done)

    def share(self, answer: dict, answers: list[dict], tokens: int) -> float:
        """How much a token of this answer counts."""
        rows = sum(bool(self.trained(a)) for a in answers)
        mode, own = self.o["aggregate"], len(self.trained(answer))
        return {"token-mean": 1 / tokens, "seq-mean-token-mean": 1 / (rows * own)}[mode]

    def policy_loss(self, answer: dict, t: int, ratio: Tensor) -> Tensor:
        worth = answer["advantages"][t]
        if not answer.get("replayed"):
            return clipped(ratio, worth, self.o["clip_low"], self.o["clip_high"], self.o["dual_clip"])
        how = self.config["replay"]
        if how["mode"] == "shaped":
            return how["coef"] * -worth * ratio / (ratio + how["offset"])
        return how["coef"] * clipped(ratio, worth, how["clip_low"], how["clip_high"], how["dual_clip"])

    def other_terms(
        self, answer: dict, t: int, now: Tensor, spread: Tensor, values: Tensor | None, share: float, tokens: int
    ) -> dict[str, Tensor]:
        """Value, KL and entropy, which replayed answers have no part in."""
        terms: dict[str, Tensor] = {}
        if values is not None:
            old, target, clip = answer["values"][t], answer["returns"][t], self.o["value_clip"]
            error = (values[t] - target) ** 2
            if clip is not None:
                error = torch.maximum(error, (values[t].clamp(old - clip, old + clip) - target) ** 2)
            terms["value"] = self.o["vf_coef"] * 0.5 * error / tokens
        if self.o["kl_coef"] and self.o["kl_in"] == "loss":
            x = now - answer["ref_logprobs"][t]
            through = x * x / 2  # the value is that of the estimate, the gradient that of KL(policy || reference)
            terms["kl"] = self.kl_coef * share * (self.kl(x.item()) + through - through.detach())
        if self.o["entropy_coef"]:
            terms["entropy"] = self.o["entropy_coef"] * (spread.exp() * spread).sum() / tokens
        return terms

    def steer(self, answers: list[dict]) -> None:
        """The KL coefficient after a step: towards its target, by the KL per answer."""
        if self.o["kl_target"] is not None:
            kl = sum(sum(a["kl"].values()) for a in answers) / len(answers)
            error = min(max(kl / self.o["kl_target"] - 1, -0.2), 0.2)
            self.kl_coef *= 1 + error * len(answers) / self.o["kl_horizon"]


def clipped(ratio: Tensor, worth: float, low: float, high: float, dual: float | None) -> Tensor:
    loss = torch.maximum(-worth * ratio, -worth * ratio.clamp(1 - low, 1 + high))
    return loss.clamp(max=-dual * worth) if dual is not None and worth < 0 else loss
