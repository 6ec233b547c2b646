"""What the recipes tell rewards about the run, and which answers they ask for beside those that train."""

import pytest
from accelerate import Accelerator
from learners import ROWS, STOP, Plain, learner_of, options_of

from rolecall.config.merge import make
from rolecall.config.training import BestOfNOptions, ExpertIterationOptions
from rolecall.policy.load import load
from rolecall.policy.model import PolicyModel
from rolecall.recipes.best_of_n import BestOfN
from rolecall.recipes.collect import Asker
from rolecall.recipes.expert_iteration import ExpertIterationLearner
from rolecall.rollout.scripted import ScriptedEngine
from rolecall.tasks.rows import ListRows
from rolecall.train.optim import make_optimizer
from rolecall.train.step import Updater
from rolecall.train.timing import Timer


class Listening(Plain):
    """Keeps what it is told."""

    def __init__(self):
        super().__init__(lambda sample: float(sample.sample_index))
        self.told = []

    def score(self, samples, *, state=None):
        self.told.append(state)
        return super().score(samples)


def asker_of(options, reward):
    return Asker(
        policy=load("tiny"),
        engine=ScriptedEngine(lambda request, sample: (ord("a"), STOP), stop_ids=(STOP,)),
        reward=reward,
        rows=ListRows(ROWS),
        chat=options.chat,
        sampling=options.sampling,
        timer=Timer(),
    )


def rl(reward):
    options = options_of("grpo", prompts=2, samples=2, steps=5)
    return learner_of(options, reward, script=lambda request, sample: (ord("a"), STOP))


def expert_iteration(reward):
    options = make(ExpertIterationOptions, {"prompts": 2, "samples": 2, "steps": 5})
    asker, accelerator = asker_of(options, reward), Accelerator(cpu=True)
    module = PolicyModel(asker.policy.model)
    wrapped, optimizer = accelerator.prepare(module, make_optimizer(module, options.optim))
    updater = Updater(accelerator, wrapped, optimizer, token_budget=4096, max_grad_norm=None)
    return ExpertIterationLearner(options, policy=asker.policy, updater=updater, asker=asker, tokenizer="bytes")


def best_of_n(reward):
    options = make(BestOfNOptions, {"prompts": 2, "n": 2})
    return BestOfN(options, asker=asker_of(options, reward), judge=reward, model=lambda: "", tokenizer="bytes")


@pytest.mark.parametrize(("recipe", "steps"), [(rl, 5), (expert_iteration, 5), (best_of_n, 2)])
def test_rewards_see_how_far_the_run_is(recipe, steps):
    """Four rows, two prompts a step: a step is half an epoch."""
    reward = Listening()
    learner = recipe(reward)
    learner.update(learner.collect(0))
    before = len(reward.told)
    learner.update(learner.collect(1))
    assert reward.told[0] == {
        "global_step": 0,
        "max_steps": steps,
        "epoch": 0.0,
        "num_train_epochs": -(-steps // 2),
        "is_local_process_zero": True,
        "is_world_process_zero": True,
    }
    later = reward.told[0] | {"global_step": 1, "epoch": 0.5}
    assert reward.told == [reward.told[0]] * before + [later] * (len(reward.told) - before)


def test_remax_asks_for_one_greedy_answer_to_each_prompt():
    asked = []

    def script(request, sample):
        asked.append((request.sampling.temperature, request.prompt, sample))
        return (ord("a"), STOP)

    learner = learner_of(options_of("remax", prompts=2, samples=3), lambda s: float(s.sample_index), script=script)
    batch = learner.collect(0).batch
    sampled = [(1.0, prompt, sample) for prompt in range(2) for sample in range(3)]
    assert asked == [*sampled, (0.0, 0, 0), (0.0, 1, 0)]
    assert batch.baselines.tolist() == [0.0] * 6
    assert batch.advantages[:, 3].tolist() == [0.0, 1.0, 2.0] * 2
