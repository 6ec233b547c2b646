"""A run remembers how its prompts were put to the model, and eval, generate and play do the same."""

import json

import pytest

import rolecall
from rolecall.policy.tiny import tiny_tokenizer

TEXT = [{"prompt": f"say {i} ", "completion": "a"} for i in range(4)]
CHAT = [
    {"messages": [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": "a"}]} for i in range(4)
]
SYSTEM = "Be brief."
SHORT = {"max_new_tokens": 2}


def sft(rows, out, **more):
    return rolecall.sft(rows=rows, out=out, steps=1, batch=2, quiet=True, **more)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    place = tmp_path_factory.mktemp("prompting")
    return {
        "text": sft(TEXT, place / "text"),
        "chat": sft(CHAT, place / "chat", chat={"system_prompt": SYSTEM}),
        "both": sft([*TEXT, {"prompt": [{"role": "user", "content": "hi"}], "completion": "a"}], place / "both"),
    }


def asked(model, prompt="sort 12=", **settings):
    """The prompt as the model saw it."""
    (answer,) = rolecall.generate(model=model, prompts=[prompt], sampling=SHORT, **settings)
    return tiny_tokenizer().decode(answer.trajectory.ids[: answer.start])


WRAPPED = tiny_tokenizer().apply_chat_template(
    [{"role": "user", "content": "sort 12="}], tokenize=False, add_generation_prompt=True
)


def test_a_run_keeps_how_it_was_trained(runs):
    kept = {name: json.loads((run.path / "run.json").read_text())["prompts"] for name, run in runs.items()}
    assert kept == {"text": "text", "chat": "chat", "both": None}


def test_generate_puts_prompts_as_in_the_run(runs):
    assert WRAPPED != "sort 12="
    assert asked(runs["text"]) == "sort 12="
    assert asked(runs["text"].model) == "sort 12=", "the run's own model directory is the same model"
    assert SYSTEM in asked(runs["chat"])
    assert "sort 12=" in asked(runs["chat"])
    assert asked("tiny") == asked(runs["both"]) == WRAPPED, "where nothing is known, by whether there is a template"


def test_generate_does_what_it_is_told(runs):
    assert asked(runs["text"], chat=True) == WRAPPED
    assert asked(runs["chat"], chat=False) == "sort 12="
    assert "Other." in asked(runs["text"], system="Other.")
    other = asked(runs["chat"], system="Other.")
    assert "Other." in other
    assert SYSTEM not in other
    messages = [{"role": "user", "content": "sort 12="}]
    assert asked(runs["text"], messages) == WRAPPED, "messages need the template"


def test_a_run_of_an_older_version_is_asked_as_before(runs, tmp_path):
    import shutil

    old = shutil.copytree(runs["text"].path, tmp_path / "old")
    about = json.loads((old / "run.json").read_text())
    del about["prompts"]
    (old / "run.json").write_text(json.dumps(about))
    assert asked(old) == WRAPPED


def test_eval_puts_prompts_as_in_the_run(runs, monkeypatch):
    from rolecall.jobs import eval as job

    seen = []
    check = job.check_prompts
    monkeypatch.setattr(
        job, "check_prompts", lambda rows, *rest: (seen.append((rows[0]["prompt"], rest[1])), check(rows, *rest))
    )

    def prompt_of(model, **settings):
        found = rolecall.eval(model=model, rows="sorting:length=2", n=2, sampling=SHORT, **settings)
        assert found.numbers["failed"] == 0
        prompt, chat = seen.pop()
        assert found.prompts[0] == prompt
        return prompt if isinstance(prompt, str) else (prompt[0]["role"], chat.system_prompt)

    assert isinstance(prompt_of(runs["text"]), str)
    assert isinstance(prompt_of("tiny"), str)
    assert prompt_of(runs["chat"]) == ("user", SYSTEM)
    assert prompt_of(runs["chat"], chat={"system_prompt": "Other."}) == ("user", "Other.")
    assert isinstance(prompt_of(runs["chat"], template=False), str)
    assert prompt_of(runs["text"], template=True) == ("user", None)


def test_play_has_the_system_prompt_of_the_run(runs):
    def told(model, **settings):
        (side,) = rolecall.play(model=model, env="guessing", agent={"max_turns": 1}, sampling=SHORT, **settings)
        return tiny_tokenizer().decode(side.trajectories[0].ids)

    assert SYSTEM in told(runs["chat"])
    assert SYSTEM not in told("tiny")
    assert SYSTEM not in told(runs["chat"], chat={"system_prompt": "Other."})


def test_play_and_eval_begin_with_the_prompt_that_the_run_gave_its_environment(tmp_path):
    lake, own = "gym:FrozenLake-v1:is_slippery=false", "You are a skater."
    short = {"sampling": SHORT, "agent.max_turns": 1}
    more = {"steps": 1, "prompts": 1, "samples": 2, "agent.prompt": own, "algorithm.entropy_coef": 0.01, "quiet": True}
    run = rolecall.rl(env=lake, out=tmp_path / "run", reward=lambda completions, **_: [0.0] * 2, **short, **more)

    def told(model=run, env=lake, **settings):
        (side,) = rolecall.play(model=model, env=env, **short, **settings)
        return side.messages[0]["content"]

    assert told().startswith(own)
    assert told(run.model).startswith(own), "the run's model directory is the same model"
    assert told(**{"agent.prompt": "Skate!"}).startswith("Skate!")
    assert told(rows=[{"prompt": "Go."}]).startswith("Go.")
    assert own not in told(env="gym:FrozenLake-v1:is_slippery=true")
    assert own not in told("tiny")
    (prompt,) = rolecall.eval(model=run.model, env=lake, n=1, **short).prompts
    assert own in str(prompt)


def test_rl_runs_keep_it_too(tmp_path):
    how = {"steps": 1, "prompts": 2, "samples": 2, "sampling": SHORT, "algorithm.entropy_coef": 0.01, "quiet": True}
    chat = [{"prompt": [{"role": "user", "content": f"{i}+1="}], "answer": "2"} for i in range(4)]
    for name, settings in {
        "text": {"rows": "sorting:length=2"},
        "chat": {"rows": chat, "reward": "exact"},
        "played": {"env": "guessing"},
    }.items():
        run = rolecall.rl(out=tmp_path / name, **settings, **how)
        kept = json.loads((run.path / "run.json").read_text())["prompts"]
        assert kept == ("text" if name == "text" else "chat")
