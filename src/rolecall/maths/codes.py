"""What a position is and why it trains or does not, as numbers that stand in files. Imports no torch, for those who only read."""

from enum import IntEnum


class Role(IntEnum):
    """What a position is. The numbers are part of the file format; new roles are appended."""

    PAD = 0
    """Nothing; only there to make a rectangle."""
    PROMPT = 1
    """Given by the task or the chat template."""
    CONTENT = 2
    """The answer: chosen by the policy (or by a demonstrator; the trajectory's author says which)."""
    STOP = 3
    """The choice to end the turn: any of the model's stop ids."""
    OBSERVATION = 4
    """Came from a tool, an environment, a user, another agent, or re-encoded history."""
    NO_CHOICE = 5
    """The policy's slot, but nothing to choose: a forced token, a dead or absent agent."""
    AFTER_END = 6
    """After the end of the answer or episode."""


class Verdict(IntEnum):
    """Why a position trains or does not. The numbers are part of the file format; PADDING is 0 so that a fresh tensor
    of zeros trains nothing."""

    PADDING = 0
    TRAINED = 1
    GIVEN = 2
    OBSERVED = 3
    NO_CHOICE = 4
    STOP_UNTRAINED = 5
    BLACKOUT = 6
    AFTER_END = 7
    TRUNCATED = 8
    REWARD_FAILED = 9
    FLAT_GROUP = 10
    REPLAY_OBSERVED = 11
    BAD_RECORD = 12

    @property
    def sentence(self) -> str:
        """The reason in words, for people."""
        return _SENTENCES[self]


_SENTENCES = {
    Verdict.PADDING: "Padding: nothing is here, the position only fills the rectangle.",
    Verdict.TRAINED: "Trained: the policy chose this position and it counts in the loss.",
    Verdict.GIVEN: "Given: the task or the chat template put it here, the policy did not choose it.",
    Verdict.OBSERVED: "Observed: the policy reads it but does not train on it; it came from a tool, an environment, a user or another agent.",
    Verdict.NO_CHOICE: "No choice: it is the policy's slot, but there was nothing to choose (a forced token, a dead or absent agent).",
    Verdict.STOP_UNTRAINED: "Stop, untrained: the policy chose to stop here, and the rule leaves stop tokens out.",
    Verdict.BLACKOUT: "Blackout: this run of tokens was cut out of training on request.",
    Verdict.AFTER_END: "After the end: the answer or episode was already over.",
    Verdict.TRUNCATED: "Truncated: the answer was cut off by a limit, and the recipe leaves such answers out.",
    Verdict.REWARD_FAILED: "Reward failed: the answer has no score, so there is nothing to learn from.",
    Verdict.FLAT_GROUP: "Flat group: all answers to this prompt scored the same, and the recipe leaves such groups out.",
    Verdict.REPLAY_OBSERVED: "Replay, observed: a replayed answer that is scored and reported but not trained on.",
    Verdict.BAD_RECORD: "Bad record: what was stored about this position is missing or not finite.",
}
