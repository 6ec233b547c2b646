"""What a step of QMIX and of MAPPO is, written out: plain, slow, in float64, with nothing of rolecall's.

`QMIX` and `MAPPO` take the settings of a run (config.json), the weights it began with and the game, and play and learn the
run again: the choices that the random numbers make, what is stored and drawn, targets, advantages, losses, gradients,
AdamW, the target networks. Networks are functions of the weights' names.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from adamw import AdamW
from torch import Tensor

Weights = dict[str, Tensor]
TRAIN, EVALUATE = 0, 1
NOTHING = torch.zeros((), dtype=torch.float64)


def linear(w: Weights, name: str, x: Tensor) -> Tensor:
    return w[f"{name}.weight"] @ x + w[f"{name}.bias"]


def layers(w: Weights, *names: str, x: Tensor) -> Tensor:
    """Linear layers with ReLU between them."""
    for name in names[:-1]:
        x = linear(w, name, x).relu()
    return linear(w, names[-1], x)


def gru(w: Weights, name: str, x: Tensor, h: Tensor) -> Tensor:
    r_x, z_x, n_x = (w[f"{name}.weight_ih_l0"] @ x + w[f"{name}.bias_ih_l0"]).chunk(3)
    r_h, z_h, n_h = (w[f"{name}.weight_hh_l0"] @ h + w[f"{name}.bias_hh_l0"]).chunk(3)
    keep = (z_x + z_h).sigmoid()
    return (1 - keep) * (n_x + (r_x + r_h).sigmoid() * n_h).tanh() + keep * h


def one_hot(i: int | None, n: int) -> Tensor:
    return torch.tensor([float(i == k) for k in range(n)], dtype=torch.float64)


def mean(numbers: Iterable[Any]) -> Any:
    numbers = list(numbers)
    return sum(numbers) / len(numbers)


def variance(numbers: list[float]) -> float:
    centre = mean(numbers)
    return mean((x - centre) ** 2 for x in numbers)


@dataclass
class Episode:
    """Of n steps: what was seen has n + 1 slots, what was done n. Lists are [slot] or [slot][agent]."""

    seed: int
    ended: bool = False
    obs: list[list[Tensor]] = field(default_factory=list)
    avail: list[list[list[int]]] = field(default_factory=list)
    there: list[list[bool]] = field(default_factory=list)
    actions: list[list[int]] = field(default_factory=list)
    reward: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.actions)

    def state(self, t: int) -> Tensor:
        return torch.cat(self.obs[t])

    def chose(self, t: int, a: int) -> bool:
        return self.there[t][a] and len(self.avail[t][a]) > 1


class Reference:
    """Plays and learns a run, one step at a time."""

    def __init__(self, config: dict[str, Any], weights: Weights, game: Callable[[], Any]) -> None:
        self.config, self.game = config, game
        self.weights = {name: w.detach().double().requires_grad_() for name, w in weights.items()}
        self.optimizer = AdamW(self.weights, config["optim"])
        self.names, self.agents = game.possible_agents, len(game.possible_agents)
        self.actions, self.width = max(game.choices.values()), max(game.sizes.values())
        self.env_steps = 0
        self.noted: list[dict[str, float]] = []

    # -- playing -----------------------------------------------------------------------------------------------------

    def said(self, w: Weights, episode: Episode) -> list[list[Tensor]]:
        """A number per action in every slot of an episode, for every agent: [slot][agent]."""
        told, net = self.config["agent"], "agents.nets.0"
        memory = [torch.zeros(told["hidden"], dtype=torch.float64)] * self.agents
        found = []
        for t, seen in enumerate(episode.obs):
            last = episode.actions[t - 1] if t else [None] * self.agents
            for a in range(self.agents):
                parts = [seen[a], one_hot(last[a], self.actions)] if told["last_action"] else [seen[a]]
                x = linear(w, f"{net}.first", torch.cat([*parts, one_hot(a, self.agents)])).relu()
                more = (
                    gru(w, f"{net}.middle", x, memory[a]) if told["recurrent"] else linear(w, f"{net}.middle", x).relu()
                )
                memory = [*memory[:a], more, *memory[a + 1 :]]
            found.append([linear(w, f"{net}.last", x) for x in memory])
        return found

    def play(self, step: int, *, phase: int = TRAIN) -> list[Episode]:
        """All episodes of a step. Every moment has its random numbers, [episode, agent], whoever needs them."""
        c = self.config
        count = c["episodes"] if phase == TRAIN else c["eval"]["episodes"]
        seeds = np.random.SeedSequence((c["seed"], phase, step)).generate_state(count, np.uint32)
        rng = np.random.default_rng([c["seed"], phase, step, 1])
        needed = 1 if c["algo"] == "mappo" else 2
        luck = np.array([[rng.random((count, self.agents)) for _ in range(needed)] for _ in range(c["limit"])])
        shares = self.shares(step, count) if phase == TRAIN else [0.0] * count
        return [self.episode(int(seed), luck[:, :, i], shares[i]) for i, seed in enumerate(seeds)]

    def shares(self, step: int, count: int) -> list[float]:
        """Random choices in each environment: falling over environment steps, with a spread that fades over the run."""
        q = self.config["q"]
        done = min(1, self.env_steps / q["epsilon_steps"])
        falling = q["epsilon_start"] + done * (q["epsilon_end"] - q["epsilon_start"])
        spread = q["epsilon_spread"] * (1 - step / self.config["steps"])
        return [max(falling, spread * i / (count - 1)) for i in range(count)]

    @torch.no_grad()
    def episode(self, seed: int, luck: Any, share: float) -> Episode:
        """One game; `luck` is [time, number, agent]."""
        env, found = self.game(), Episode(seed)
        env.reset(seed=seed)
        self.see(env, found)
        for t in range(self.config["limit"]):
            now = self.said(self.weights, found)[t]
            chosen = [self.choose(now[a], found.avail[t][a], luck[t, :, a], share) for a in range(self.agents)]
            _, paid, *_ = env.step({n: chosen[a] for a, n in enumerate(self.names) if found.there[t][a]})
            found.actions.append(chosen)
            found.reward.append(sum(paid.values()) / self.agents)
            self.see(env, found)
            if env.over:
                found.ended = env.luck == 0
                break
        return found

    def see(self, env: Any, found: Episode) -> None:
        """Those who are away see zeros and have action 0 only."""
        nothing = [0.0] * self.width
        seen = [[*map(float, env.seen.get(name, ())), *nothing][: self.width] for name in self.names]
        found.obs.append([torch.tensor(row, dtype=torch.float64) for row in seen])
        may = [env.may[name] if name in env.seen else [True] for name in self.names]
        found.avail.append([[a for a, yes in enumerate(row) if yes] for row in may])
        found.there.append([name in env.seen for name in self.names])

    def choose(self, scores: Tensor, avail: list[int], luck: Any, share: float) -> int:
        if self.config["algo"] == "mappo":
            ends = scores[avail].softmax(0).cumsum(0).tolist()
            return next(a for a, end in zip(avail, [*ends[:-1], math.inf], strict=True) if luck[0] < end)
        if luck[0] < share:
            return avail[int(luck[1] * len(avail))]
        return max(avail, key=lambda a: scores[a].item())

    # -- learning ----------------------------------------------------------------------------------------------------

    def learn(self, step: int) -> tuple[list[Episode], dict[str, float]]:
        """One step; returns its episodes and its metrics, means over the optimiser steps."""
        self.noted, episodes = [], self.play(step)
        self.env_steps += sum(map(len, episodes))
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
        o, top = self.config["q"], max(self.priorities, default=1.0)
        for episode in episodes:
            room = slice(self.next, self.next + 1)  # of the oldest, or behind the last
            self.ring[room], self.priorities[room] = [episode], [top]
            self.next = (self.next + 1) % o["buffer"]
            self.rewards += episode.reward
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
        chance: dict[int, float] = {}
        rest = list(range(len(sizes)))
        while rest:
            left, total = count - len(chance), sum(sizes[i] for i in rest)
            certain = [i for i in rest if left * sizes[i] / total > 1 - 1e-12]
            if not certain:
                break
            chance |= dict.fromkeys(certain, 1.0)
            rest = [i for i in rest if i not in chance]
        drawn, end = set(chance), 0.0
        order, point = rng.permutation(rest).tolist(), float(rng.random())
        for i in order:  # points one apart, from a random one, on the chances laid end to end
            chance[int(i)] = left * sizes[int(i)] / total
            end += chance[int(i)]
            if point < end:
                drawn.add(int(i))
                point += 1
        assert len(drawn) == count
        return {i: (min(chance.values()) / chance[i]) ** o["beta"] for i in drawn}

    def mixed(self, w: Weights, values: list[Tensor], state: Tensor) -> Tensor:
        """The team's value: a network whose weights come from the state and are not negative."""
        first = layers(w, "mixer.weights1.0", "mixer.weights1.2", x=state).abs().view(self.agents, -1)
        second = layers(w, "mixer.weights2.0", "mixer.weights2.2", x=state).abs()
        hidden = sum(value * first[a] for a, value in enumerate(values)) + linear(w, "mixer.bias1", state)
        return torch.where(hidden > 0, hidden, hidden.exp() - 1) @ second + layers(
            w, "mixer.value.0", "mixer.value.2", x=state
        )

    def team(self, w: Weights, episode: Episode, t: int, said: list[Tensor], actions: list[int]) -> Tensor:
        """What the team's value is if the agents do this; who is away adds nothing."""
        parts = [said[a][k] if episode.there[t][a] else NOTHING for a, k in enumerate(actions)]
        return self.mixed(w, parts, episode.state(t))[0]

    def learn_once(self, step: int) -> None:
        o, deviation = self.config["q"], math.sqrt(variance(self.rewards))
        squares, taken, targets, size = [], [], [], {}
        for i, weight in self.draw().items():
            episode = self.ring[i]
            live, theirs, value = self.said(self.weights, episode), self.said(self.target, episode), []
            for t, may in enumerate(episode.avail):
                by = (live if o["double"] else theirs)[t]
                best = [max(may[a], key=lambda k, row=by[a]: row[k].item()) for a in range(self.agents)]
                value.append(self.team(self.target, episode, t, theirs[t], best).item())
            y = value[-1] = 0.0 if episode.ended else value[-1]
            size[i] = []
            for t in reversed(range(len(episode))):
                y = episode.reward[t] / deviation + o["gamma"] * ((1 - o["lam"]) * value[t + 1] + o["lam"] * y)
                q = self.team(self.weights, episode, t, live[t], episode.actions[t])
                squares.append(weight * (q - y) ** 2)
                taken.append(q.item())
                targets.append(y)
                size[i].append(abs(q.item() - y))
        errors = {i: mean(found) for i, found in size.items()}
        noted = {"q/taken": mean(taken), "q/target": mean(targets), "q/error": mean(errors.values())}
        self.descend(mean(squares), step, noted)
        for i, error in errors.items():
            self.priorities[i] = error + 1e-6


@dataclass
class Place:
    """A step of an episode at which an agent is there."""

    episode: int
    t: int
    agent: int
    chose: bool
    action: int
    old: float
    """Its log-prob when it was played."""
    value: float
    advantage: float
    target: float


class MAPPO(Reference):
    """PPO for each agent, with a critic of the whole state that learns returns on their running scale.

    Mini-batches are of single steps, as they are for agents without memory.
    """

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
        x = torch.cat([episode.state(t), one_hot(a, self.agents)])
        return layers(self.weights, "critic.body.0", "critic.body.2", "critic.body.4", x=x)[0]

    def logprobs(self, episode: Episode) -> list[list[dict[int, Tensor]]]:
        """Of every action that may be done: [slot][agent]."""

        def of(scores: Tensor, may: list[int]) -> dict[int, Tensor]:
            return dict(zip(may, scores[may].log_softmax(0), strict=True))

        slots = zip(self.said(self.weights, episode), episode.avail, strict=True)
        return [[of(*agent) for agent in zip(said, avail, strict=True)] for said, avail in slots]

    @torch.no_grad()
    def places(self, episodes: list[Episode]) -> list[Place]:
        """GAE over environment steps; the value of a step at which an agent is away is what comes after it."""
        o, found = self.config["ppo"], []
        centre, scale = self.moments()
        for b, e in enumerate(episodes):
            n, spread = len(e), self.logprobs(e)
            for a in range(self.agents):
                value = [self.value(e, t, a).item() * scale + centre for t in range(n + 1)]
                if e.ended or not e.there[n][a]:
                    value[n] = 0.0
                later, row = 0.0, []
                for t in reversed(range(n)):
                    ahead = e.reward[t] + o["gamma"] * value[t + 1]
                    if not e.there[t][a]:
                        value[t] = ahead
                    later = ahead - value[t] + o["gamma"] * o["lam"] * later
                    old = spread[t][a][e.actions[t][a]].item()
                    place = Place(b, t, a, e.chose(t, a), e.actions[t][a], old, value[t], later, later + value[t])
                    row += [place] if e.there[t][a] else []
                found += reversed(row)
        return found

    def update(self, step: int, episodes: list[Episode]) -> dict[str, float]:
        o, places = self.config["ppo"], self.places(episodes)
        returns, counted = [p.target for p in places], [p.advantage for p in places if p.chose]
        measured = {
            "policy/value": mean(p.value for p in places),
            "policy/advantage_abs": mean(map(abs, counted)),
            "critic/explained_variance": 1 - variance([p.target - p.value for p in places]) / variance(returns),
        }
        self.seen.append((mean(returns), mean(x**2 for x in returns)))
        (centre, scale), middle, deviation = self.moments(), mean(counted), math.sqrt(variance(counted) + 1e-8)
        for p in places:
            p.advantage = (p.advantage - middle) / deviation
            p.value, p.target = (p.value - centre) / scale, (p.target - centre) / scale
        end = o["entropy_coef"] if o["entropy_end"] is None else o["entropy_end"]
        bonus = o["entropy_coef"] + step / max(1, self.config["steps"] - 1) * (end - o["entropy_coef"])
        rng = np.random.default_rng([self.config["seed"], 2, step])
        for _ in range(o["epochs"]):
            order = rng.permutation(len(places)).tolist()
            per = math.ceil(len(order) / o["minibatches"])
            for start in range(0, len(order), per):
                part = [places[i] for i in order[start : start + per]]
                self.descend(*self.loss(episodes, part, bonus, step))
        return measured

    def loss(self, episodes: list[Episode], places: list[Place], bonus: float, step: int) -> tuple[Tensor, int, dict]:
        o, clip = self.config["ppo"], self.config["ppo"]["clip"]
        spread = [self.logprobs(episode) for episode in episodes]
        policy, value, entropy, apart, held = [], [], [], [], []
        for p in places:
            now, may, worth = (
                self.value(episodes[p.episode], p.t, p.agent),
                spread[p.episode][p.t][p.agent],
                p.advantage,
            )
            near = now.clamp(p.value - o["value_clip"], p.value + o["value_clip"])
            value.append(0.5 * torch.maximum((now - p.target) ** 2, (near - p.target) ** 2))
            if not p.chose:
                continue
            x = may[p.action] - p.old
            policy.append(torch.maximum(-worth * x.exp(), -worth * x.exp().clamp(1 - clip, 1 + clip)))
            entropy.append(-sum(y.exp() * y for y in may.values()))
            apart.append((x.exp() - 1 - x).item())
            held.append(float(abs(x.exp().item() - 1) > clip and x.item() * worth > 0))
        terms = {"policy": mean(policy), "value": mean(value), "entropy": mean(entropy)}
        noted = {f"loss/{name}": term.item() for name, term in terms.items()}
        noted |= {"policy/approx_kl": mean(apart), "clip_ratio/region_mean": mean(held)}
        return terms["policy"] + o["vf_coef"] * terms["value"] - bonus * terms["entropy"], step, noted
