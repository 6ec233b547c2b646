"""The same numbers of a model that is known by its texts alone: one behind somebody else's API."""

from collections.abc import Sequence
from typing import Any

from rolecall.config.parts import ChatOptions
from rolecall.recipes.collect import as_completion
from rolecall.recipes.evaluate import Evaluator, HeldOut, ScoredAnswer
from rolecall.remote.plain import PlainServer
from rolecall.rewards.records import Reward, Sample
from rolecall.types import Sampling


class TextEvaluator(Evaluator):
    """Of answers to prompts. There is no KL, and rewards see no token ids."""

    def __init__(self, *, server: PlainServer, reward: Reward, chat: ChatOptions, **how: Any) -> None:
        """`how` is for `HeldOut`."""
        HeldOut.__init__(self, **how)
        self.server, self.reward, self.chat, self.train_reward = server, reward, chat, None

    def _answers(self, sampling: Sampling, n: int, *, sampled: bool = False) -> list[ScoredAnswer]:
        prompts = [self._put(row["prompt"]) for row in self.rows]
        template = self.chat.chat_template_kwargs
        found = self.server.answers(prompts, sampling, n=n, seed=self.seed, template=template)
        answers = [(i, k, answer) for i, row in enumerate(found) for k, answer in enumerate(row)]
        totals = self._score(self.reward, [self._sample(i, k, answer.text) for i, k, answer in answers])
        return [
            ScoredAnswer(
                prompt=i,
                sample=k,
                text=answer.text,
                length=answer.tokens,
                truncated=answer.truncated,
                total=total,
                pleased=None,
                kl=0.0,
            )
            for (i, k, answer), total in zip(answers, totals, strict=True)
        ]

    def _sample(self, prompt: int, sample: int, answer: str) -> Sample:
        row = self.rows[prompt]
        completion = as_completion(row["prompt"], answer)
        return Sample(prompt=row["prompt"], completion=completion, row=row, prompt_index=prompt, sample_index=sample)

    def _put(self, prompt: Any) -> str | Sequence[Any]:
        """As the server gets it."""
        system = self.chat.system_prompt
        if isinstance(prompt, str) or system is None or prompt[0]["role"] == "system":
            return prompt
        return [{"role": "system", "content": system}, *prompt]
