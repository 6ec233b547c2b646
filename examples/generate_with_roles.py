"""Every token with its role and log-prob: what was given, what was chosen, and whether the model chose to stop."""

import rolecall
from rolecall.maths.roles import Role

if __name__ == "__main__":
    answers = rolecall.generate(
        model="tiny", prompts=["12+34="], n=2, chat=False, sampling={"max_new_tokens": 6, "temperature": 0.8}
    )
    for answer in answers:
        print(f"{answer.text!r} ended by {answer.finish}")
        trajectory = answer.trajectory
        for token, role, logprob in zip(answer.tokens, trajectory.roles, trajectory.behaviour_logprobs, strict=True):
            print(f"  {Role(role).name:8} {logprob:8.3f}  {token!r}")
