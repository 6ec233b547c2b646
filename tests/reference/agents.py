"""What a step of QMIX and of MAPPO is, written out: plain, slow, in float64, with nothing of rolecall's.

`Reference` takes the settings of a run (config.json), the weights it began with and the game, and plays and learns the
run again: the choices that the random numbers make, what is stored and drawn, targets, advantages, losses, gradients,
AdamW, the target networks. An episode of n steps is a dict of lists: `obs`, `avail`, `there` have n + 1 slots, `actions`
and `reward` n. Networks are functions of the weights' names.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from adamw import AdamW
from torch import Tensor

Episode = dict[str, Any]
Weights = dict[str, Tensor]
TRAIN, EVALUATE = 0, 1


def linear(w: Weights, name: str, x: Tensor) -> Tensor:
    return w[f"{name}.weight"] @ x + w[f"{name}.bias"]


def two_layers(w: Weights, name: str, x: Tensor) -> Tensor:
    return linear(w, f"{name}.2", linear(w, f"{name}.0", x).relu())


def gru(w: Weights, name: str, x: Tensor, h: Tensor) -> Tensor:
    gates = (w[f"{name}.weight_ih_l0"] @ x + w[f"{name}.bias_ih_l0"]).chunk(3)
    r_h, z_h, n_h = (w[f"{name}.weight_hh_l0"] @ h + w[f"{name}.bias_hh_l0"]).chunk(3)
    r, z = (gates[0] + r_h).sigmoid(), (gates[1] + z_h).sigmoid()
    return (1 - z) * (gates[2] + r * n_h).tanh() + z * h


def one_hot(i: int | None, n: int) -> Tensor:
    return torch.tensor([float(i == k) for k in range(n)], dtype=torch.float64)


def mean(numbers: Any) -> Any:
    numbers = list(numbers)
    return sum(numbers) / len(numbers)


def variance(numbers: Any) -> float:
    numbers = list(numbers)
    return mean((x - mean(numbers)) ** 2 for x in numbers)


class Reference:
    """Plays and learns a run, one step at a time; `metrics` of each step are means over its optimiser steps."""

    def __init__(self, config: dict[str, Any], weights: Weights, game: Callable[[], Any]) -> None:
        self.config, self.game = config, game
        self.weights = {name: w.detach().double().requires_grad_() for name, w in weights.items()}
        self.optimizer = AdamW(self.weights, config["optim"])
        made = game()
        self.names = made.possible_agents
        self.agents, self.actions = len(self.names), max(made.choices.values())
        self.width = max(made.sizes.values())
        self.env_steps = 0
        self.noted: list[dict[str, float]] = []

    # -- playing -----------------------------------------------------------------------------------------------------

    def scores(self, w: Weights, seen: Tensor, last: int | None, agent: int, memory: Tensor) -> tuple[Tensor, Tensor]:
        """[action] of one agent at one moment, and what it remembers after it."""
        told = self.config["agent"]
        parts = [seen, one_hot(last, self.actions)] if told["last_action"] else [seen]
        x = linear(w, "agents.nets.0.first", torch.cat([*parts, one_hot(agent, self.agents)])).relu()
        if told["recurrent"]:
            x = memory = gru(w, "agents.nets.0.middle", x, memory)
        else:
            x = linear(w, "agents.nets.0.middle", x).relu()
        return linear(w, "agents.nets.0.last", x), memory

    def said(self, w: Weights, episode: Episode) -> list[list[Tensor]]:
        """The scores in every slot of an episode, for every agent: [slot][agent]."""
        memory = [torch.zeros(self.config["agent"]["hidden"], dtype=torch.float64)] * self.agents
        found: list[list[Tensor]] = []
        for t, seen in enumerate(episode["obs"]):
            last = episode["actions"][t - 1] if t else [None] * self.agents
            both = [self.scores(w, seen[a], last[a], a, memory[a]) for a in range(self.agents)]
            found.append([scores for scores, _ in both])
            memory = [after for _, after in both]
        return found

    def play(self, step: int, *, phase: int = TRAIN) -> list[Episode]:
        """All episodes of a step. Every moment has its random numbers, [episode, agent], whoever needs them."""
        c = self.config
        count = c["episodes"] if phase == TRAIN else c["eval"]["episodes"]
        seeds = np.random.SeedSequence((c["seed"], phase, step)).generate_state(count, np.uint32)
        rng = np.random.default_rng([c["seed"], phase, step, 1])
        needed = 1 if c["algo"] == "mappo" else 2 if phase == TRAIN else 0
        luck = [[rng.random((count, self.agents)) for _ in range(needed)] for _ in range(c["limit"])]
        shares = self.shares(step, count) if phase == TRAIN else [0.0] * count
        return [
            self.episode(int(seed), [[u[i] for u in moment] for moment in luck], shares[i])
            for i, seed in enumerate(seeds)
        ]

    def shares(self, step: int, count: int) -> list[float]:
        """Random choices in each environment: falling over environment steps, with a spread that fades over the run."""
        q = self.config["q"]
        falling = q["epsilon_start"] + min(1, self.env_steps / q["epsilon_steps"]) * (
            q["epsilon_end"] - q["epsilon_start"]
        )
        spread = q["epsilon_spread"] * (1 - step / self.config["steps"])
        return [max(falling, spread * i / (count - 1)) for i in range(count)]

    @torch.no_grad()
    def episode(self, seed: int, luck: list[list[Any]], share: float) -> Episode:
        env = self.game()
        env.reset(seed=seed)
        found: Episode = {
            "seed": seed,
            "ended": False,
            "obs": [],
            "avail": [],
            "there": [],
            "actions": [],
            "reward": [],
        }
        while True:
            self.see(env, found)
            t = len(found["actions"])
            if t == self.config["limit"] or (t and env.over):
                found["ended"] = bool(t and env.over and env.luck == 0)
                return found
            now = self.said(self.weights, found)[t]
            chosen = [
                self.choose(now[a], found["avail"][t][a], [u[a] for u in luck[t]], share) for a in range(self.agents)
            ]
            _, paid, *_ = env.step({n: chosen[a] for a, n in enumerate(self.names) if found["there"][t][a]})
            found["actions"].append(chosen)
            found["reward"].append(sum(paid.values()) / self.agents)

    def see(self, env: Any, found: Episode) -> None:
        """Those who are away see zeros and have action 0 only."""
        obs, avail = [], []
        for name in self.names:
            seen = env.seen.get(name)
            row = torch.zeros(self.width, dtype=torch.float64)
            if seen is not None:
                row[: len(seen)] = torch.from_numpy(seen).double()
            may = [a for a in range(self.actions) if seen is not None and a < len(env.may[name]) and env.may[name][a]]
            obs.append(row)
            avail.append(may if seen is not None else [0])
        found["obs"].append(obs)
        found["avail"].append(avail)
        found["there"].append([name in env.seen for name in self.names])

    def choose(self, scores: Tensor, avail: list[int], luck: list[float], share: float) -> int:
        if self.config["algo"] == "mappo":
            ends = scores[avail].softmax(0).cumsum(0).tolist()
            return next(a for a, end in zip(avail, [*ends[:-1], math.inf], strict=True) if luck[0] < end)
        if luck and luck[0] < share:
            return avail[int(luck[1] * len(avail))]
        return max(avail, key=lambda a: scores[a].item())

    def chose(self, episode: Episode, t: int, a: int) -> bool:
        return episode["there"][t][a] and len(episode["avail"][t][a]) > 1

    def state(self, episode: Episode, t: int) -> Tensor:
        return torch.cat(episode["obs"][t])

    # -- learning ----------------------------------------------------------------------------------------------------

    def learn(self, step: int) -> tuple[list[Episode], dict[str, float]]:
        """One step; returns its episodes and metrics."""
        self.noted = []
        episodes = self.play(step)
        self.env_steps += sum(len(e["actions"]) for e in episodes)
        measured = self.update(step, episodes)
        return episodes, measured | {name: mean(n[name] for n in self.noted) for name in self.noted[0]}

    def update(self, step: int, episodes: list[Episode]) -> dict[str, float]:
        raise NotImplementedError

    def descend(self, loss: Tensor, step: int, noted: dict[str, float]) -> None:
        norm = self.optimizer.step(loss, done=step)
        self.noted.append(noted | {"loss": loss.item(), "grad_norm": norm})


class QMIX(Reference):
    """Rashid et al. 2018, on episodes drawn by priority from a ring."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.target = {name: w.detach().clone() for name, w in self.weights.items()}
        self.ring: list[Episode] = []
        self.priorities: list[float] = []
        self.next = self.draws = 0
        self.rewards: list[float] = []

    def update(self, step: int, episodes: list[Episode]) -> dict[str, float]:
        o = self.config["q"]
        top = max(self.priorities, default=0.0) or 1.0
        for episode in episodes:
            if len(self.ring) < o["buffer"]:
                self.ring.append(episode)
                self.priorities.append(top)
            else:
                self.ring[self.next], self.priorities[self.next] = episode, top
            self.next = (self.next + 1) % o["buffer"]
            self.rewards += episode["reward"]
        for _ in range(o["updates"]):
            self.learn_once(step)
            for name, held in self.target.items():
                if o["tau"] is not None:
                    held += o["tau"] * (self.weights[name].detach() - held)
                elif self.optimizer.updates % o["target_every"] == 0:
                    held.copy_(self.weights[name].detach())
        return {}

    def draw(self) -> dict[int, float]:
        """Different episodes and their weights: the chance to be drawn is proportional to priority^alpha, at most 1."""
        o = self.config["q"]
        rng = np.random.default_rng([self.config["seed"], self.draws])
        self.draws += 1
        count, sizes = min(o["batch"], len(self.ring)), [p ** o["alpha"] for p in self.priorities]
        certain: set[int] = set()
        while True:
            rest = [i for i in range(len(sizes)) if i not in certain]
            chance = {i: (count - len(certain)) * sizes[i] / sum(sizes[j] for j in rest) for i in rest}
            over = {i for i in rest if chance[i] > 1 - 1e-12}
            if not over:
                break
            certain |= over
        chance |= dict.fromkeys(certain, 1.0)
        drawn, end = set(certain), 0.0
        order = rng.permutation(rest).tolist() if rest else []
        point = float(rng.random())
        for i in order:  # points one apart, from `point`, on the chances laid end to end
            end += chance[i]
            if point < end:
                drawn.add(i)
                point += 1
        assert len(drawn) == count
        return {i: (min(chance.values()) / chance[i]) ** o["beta"] for i in drawn}

    def mixed(self, w: Weights, values: list[Tensor], state: Tensor) -> Tensor:
        """The team's value: a network whose weights come from the state and are not negative."""
        embed = self.config["q"]["embed"]
        first = two_layers(w, "mixer.weights1", state).abs().view(self.agents, embed)
        hidden = sum(value * first[a] for a, value in enumerate(values)) + linear(w, "mixer.bias1", state)
        hidden = torch.where(hidden > 0, hidden, hidden.exp() - 1)
        return hidden @ two_layers(w, "mixer.weights2", state).abs() + two_layers(w, "mixer.value", state)[0]

    def learn_once(self, step: int) -> None:
        o = self.config["q"]
        deviation = math.sqrt(variance(self.rewards))
        squares, taken, targets, size = [], [], [], {}
        for i, weight in self.draw().items():
            episode = self.ring[i]
            n, live, theirs = len(episode["actions"]), self.said(self.weights, episode), self.said(self.target, episode)
            value = []
            for t in range(n + 1):
                parts = []
                for a in range(self.agents):
                    by = live if o["double"] else theirs
                    best = max(episode["avail"][t][a], key=lambda k, at=by[t][a]: at[k].item())
                    parts.append(theirs[t][a][best] if episode["there"][t][a] else torch.zeros(()))
                value.append(self.mixed(self.target, parts, self.state(episode, t)).item())
            if episode["ended"]:
                value[n] = 0.0
            y, errors = value[n], []
            for t in reversed(range(n)):
                y = episode["reward"][t] / deviation + o["gamma"] * ((1 - o["lam"]) * value[t + 1] + o["lam"] * y)
                done = [
                    live[t][a][episode["actions"][t][a]] if episode["there"][t][a] else torch.zeros(())
                    for a in range(self.agents)
                ]
                q = self.mixed(self.weights, done, self.state(episode, t))
                squares.append(weight * (q - y) ** 2)
                taken.append(q.item())
                targets.append(y)
                errors.append(abs(q.item() - y))
            size[i] = mean(errors)
        noted = {"q/taken": mean(taken), "q/target": mean(targets), "q/error": mean(size.values())}
        self.descend(mean(squares), step, noted)
        for i, error in size.items():
            self.priorities[i] = error + 1e-6


class MAPPO(Reference):
    """PPO for each agent, with a critic of the whole state that learns returns on their running scale."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.seen: list[tuple[float, float]] = []

    def moments(self) -> tuple[float, float]:
        """Mean and deviation of the returns so far; a step's weight falls by 0.99 with every later one."""
        if not self.seen:
            return 0.0, 1.0
        weights = [0.99**k for k in reversed(range(len(self.seen)))]
        first, second = (sum(w * s[k] for w, s in zip(weights, self.seen, strict=True)) / sum(weights) for k in (0, 1))
        return first, math.sqrt(second - first**2)

    def value(self, episode: Episode, t: int, a: int) -> Tensor:
        """On the critic's own scale."""
        x = torch.cat([self.state(episode, t), one_hot(a, self.agents)])
        x = linear(self.weights, "critic.body.0", x).relu()
        return linear(self.weights, "critic.body.4", linear(self.weights, "critic.body.2", x).relu())[0]

    def update(self, step: int, episodes: list[Episode]) -> dict[str, float]:
        o, places = self.config["ppo"], []
        centre, scale = self.moments()
        for b, episode in enumerate(episodes):
            n = len(episode["actions"])
            with torch.no_grad():
                spread = self.logprobs(episode)
            for a in range(self.agents):
                value = [self.value(episode, t, a).item() * scale + centre for t in range(n + 1)]
                if episode["ended"] or not episode["there"][n][a]:
                    value[n] = 0.0
                for t in reversed(range(n)):
                    if not episode["there"][t][a]:
                        value[t] = episode["reward"][t] + o["gamma"] * value[t + 1]
                later, row = 0.0, []
                for t in reversed(range(n)):
                    delta = episode["reward"][t] + o["gamma"] * value[t + 1] - value[t]
                    later = delta + o["gamma"] * o["lam"] * later
                    if episode["there"][t][a]:
                        old = spread[t][a][episode["actions"][t][a]].item()
                        row.append({"at": (b, t, a), "advantage": later, "value": value[t], "old": old})
                places += row[::-1]
        for p in places:
            p["return"] = p["advantage"] + p["value"]
        returns, values = [p["return"] for p in places], [p["value"] for p in places]
        missed = [r - v for r, v in zip(returns, values, strict=True)]
        counted = [p["advantage"] for p in places if self.chose(episodes[p["at"][0]], *p["at"][1:])]
        measured = {
            "policy/value": mean(values),
            "policy/advantage_abs": mean(abs(x) for x in counted),
            "critic/explained_variance": 1 - variance(missed) / variance(returns),
        }
        self.seen.append((mean(returns), mean(x**2 for x in returns)))
        centre, scale = self.moments()
        for p in places:
            p["advantage"] = (p["advantage"] - mean(counted)) / math.sqrt(variance(counted) + 1e-8)
            p["value"], p["return"] = (p["value"] - centre) / scale, (p["return"] - centre) / scale
        end = o["entropy_coef"] if o["entropy_end"] is None else o["entropy_end"]
        bonus = o["entropy_coef"] + step / max(1, self.config["steps"] - 1) * (end - o["entropy_coef"])
        rng = np.random.default_rng([self.config["seed"], 2, step])
        recurrent = self.config["agent"]["recurrent"]
        for _ in range(o["epochs"]):
            if o["minibatches"] == 1:
                self.learn_from(step, episodes, places, bonus)
                continue
            order = rng.permutation(len(episodes) if recurrent else len(places)).tolist()
            per = math.ceil(len(order) / o["minibatches"])
            for start in range(0, len(order), per):
                part = set(order[start : start + per])
                self.learn_from(
                    step, episodes, [p for i, p in enumerate(places) if (p["at"][0] if recurrent else i) in part], bonus
                )
        return measured

    def logprobs(self, episode: Episode) -> list[list[dict[int, Tensor]]]:
        """Of every action that may be done, [slot][agent]."""
        return [
            [dict(zip(may, scores[may].log_softmax(0), strict=True)) for scores, may in zip(said, avail, strict=True)]
            for said, avail in zip(self.said(self.weights, episode), episode["avail"], strict=True)
        ]

    def learn_from(self, step: int, episodes: list[Episode], places: list[dict], bonus: float) -> None:
        o, clip = self.config["ppo"], self.config["ppo"]["clip"]
        spread = [self.logprobs(episode) for episode in episodes]
        policy, value, entropy, apart, clipped = [], [], [], [], []
        for p in places:
            b, t, a = p["at"]
            now, target, worth = self.value(episodes[b], t, a), p["return"], p["advantage"]
            near = now.clamp(p["value"] - o["value_clip"], p["value"] + o["value_clip"])
            value.append(0.5 * torch.maximum((now - target) ** 2, (near - target) ** 2))
            if not self.chose(episodes[b], t, a):
                continue
            all_of_it = spread[b][t][a]
            x = all_of_it[episodes[b]["actions"][t][a]] - p["old"]
            ratio = x.exp()
            policy.append(torch.maximum(-worth * ratio, -worth * ratio.clamp(1 - clip, 1 + clip)))
            entropy.append(-sum(y.exp() * y for y in all_of_it.values()))
            apart.append((ratio - 1 - x).item())
            clipped.append(float(abs(ratio.item() - 1) > clip and x.item() * worth > 0))
        terms = {"policy": mean(policy), "value": mean(value), "entropy": mean(entropy)}
        loss = terms["policy"] + o["vf_coef"] * terms["value"] - bonus * terms["entropy"]
        noted = {f"loss/{name}": term.item() for name, term in terms.items()}
        noted |= {"policy/approx_kl": mean(apart), "clip_ratio/region_mean": mean(clipped)}
        self.descend(loss, step, noted)
