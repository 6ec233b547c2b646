"""A guessing game behind an OpenEnv server, and how to train on it.

    pip install 'rolecall[openenv]'
    python examples/openenv_server.py 8000
    rolecall rl --env openenv:http://127.0.0.1:8000 --agent.network --steps 50

The server is OpenEnv's own; nothing in it knows of rolecall.
"""

import sys
from random import Random

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from pydantic import Field


class Guess(Action):
    """A guess."""

    number: int = Field(ge=1, le=7, description="your guess, from 1 to 7")


class Hint(Observation):
    """What the guess was."""

    hint: str


class Guessing(Environment):
    """Guess the number in four tries."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, highest=7, **kwargs):
        self.secret, self.tries = Random(seed).randint(1, highest), 0
        return Hint(hint=f"Guess a number from 1 to {highest}.")

    def step(self, action, timeout_s=None, **kwargs):
        self.tries += 1
        right = action.number == self.secret
        hint = "right" if right else "higher" if action.number < self.secret else "lower"
        return Hint(hint=hint, reward=float(right), done=right or self.tries == 4)

    @property
    def state(self):
        return State(step_count=self.tries)


if __name__ == "__main__":
    app = create_fastapi_app(Guessing, Guess, Hint, max_concurrent_envs=64)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
