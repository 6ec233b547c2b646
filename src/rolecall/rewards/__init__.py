"""Rewards: functions with TRL's or verl's signature, run in processes that can be killed.

`records` says what goes in and out, `pool` is what the training loop calls, `verifiers` are the built-in rewards, `model`
is a reward model as the reward. Only `model` imports torch, and nothing here imports it.
"""

from rolecall.rewards.pool import RewardPool
from rolecall.rewards.records import Reward, RewardError, Sample, Scored, WrongCount

__all__ = ["Reward", "RewardError", "RewardPool", "Sample", "Scored", "WrongCount"]
