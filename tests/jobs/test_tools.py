"""The tools and template settings of a row reach the model, whichever command renders it."""

import json
import warnings

import pytest

import rolecall
from rolecall.config.parts import ChatOptions
from rolecall.errors import UserError
from rolecall.jobs.data import check_prompts, demonstrated
from rolecall.policy.heads import RewardModel
from rolecall.policy.load import load, save
from rolecall.policy.tiny import tiny_tokenizer
from rolecall.recipes.rendering import rendered_pairs, rendered_rows
from rolecall.recipes.reward_model import make_pairs
from rolecall.rewards.model import RewardModelReward
from rolecall.rewards.records import Sample
from rolecall.rollout.native import NativeEngine
from rolecall.tasks.rows import ListRows, RowError

TEMPLATE = (  # as Qwen writes it, in short
    "{% if tools %}<|im_start|>system\n# Tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n"
    "{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATE = "{% if mood is defined %}<|im_start|>system\nmood {{ mood }}<|im_end|>\n{% endif %}" + TEMPLATE
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}
ASKED = [{"role": "user", "content": "warm?"}]
SAID = [{"role": "assistant", "content": "yes"}]
ROWS = [
    {"prompt": ASKED, "tools": [WEATHER], "chat_template_kwargs": {"mood": "calm"}},
    {"prompt": ASKED, "tools": json.dumps([CLOCK]), "chat_template_kwargs": json.dumps({"mood": "gay"})},
    {"prompt": ASKED, "tools": None, "chat_template_kwargs": None},
]
CHAT = ChatOptions(chat_template_kwargs={"mood": "run's"})
SHORT = {"sampling": {"max_new_tokens": 2}}


PROGRAMS = f"""
def length(completions, **columns):
    return [float(len(str(c))) for c in completions]


class Porter:
    tools = [{CLOCK}]

    def reset(self, row, seed):
        return "go"

    def step(self, message):
        from rolecall.tasks.env import Step

        return Step(reward=1.0, done=True)
"""


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """A file with a reward and an environment that has a tool of its own."""
    path = tmp_path_factory.mktemp("programs") / "programs.py"
    path.write_text(PROGRAMS)
    return str(path)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    place = tmp_path_factory.mktemp("models") / "with-tools"
    loaded = load("tiny")
    loaded.tokenizer.chat_template = TEMPLATE
    save(loaded, place)
    return str(place)


@pytest.fixture
def asked(monkeypatch):
    """The text of every prompt that an engine is asked."""
    texts: list[str] = []
    start = NativeEngine.start

    def spy(self, ticket):
        texts.append(self.tokenizer.decode(ticket.request.prompt_ids))
        return start(self, ticket)

    monkeypatch.setattr(NativeEngine, "start", spy)
    return texts


def names(text):
    return [name for name in ("weather", "clock") if f'"name": "{name}"' in text]


def mood(text):
    return text.partition("mood ")[2].partition("<")[0]


def assert_all_tools(texts):
    found = {tuple(names(text)): mood(text) for text in texts}
    assert found == {("weather",): "calm", ("clock",): "gay", (): "run's"}


def settings(model, tmp_path, programs, **more):
    return {
        "model": model,
        "rows": ROWS,
        "reward": f"{programs}:length",
        "out": str(tmp_path / "run"),
        "quiet": True,
        "chat.chat_template_kwargs": {"mood": "run's"},
        **SHORT,
        **more,
    }


def test_rl_and_its_evaluation(model, tmp_path, programs, asked):
    rolecall.rl(**settings(model, tmp_path, programs, steps=1, prompts=3, samples=2))
    assert_all_tools(asked)


def test_eval(model, programs, asked):
    rolecall.eval(model=model, rows=ROWS, reward=f"{programs}:length", chat=CHAT, **SHORT)
    assert_all_tools(asked)


def test_best_of_n(model, tmp_path, programs, asked):
    rolecall.best_of_n(**settings(model, tmp_path, programs, n=2))
    assert_all_tools(asked)


def test_expert_iteration(model, tmp_path, programs, asked):
    rolecall.expert_iteration(**settings(model, tmp_path, programs, steps=1, prompts=3, samples=2))
    assert_all_tools(asked)


def test_audit(model, programs, asked):
    given = {"chat.chat_template_kwargs": {"mood": "run's"}, "groups": 3, "samples": 2, **SHORT}
    found = rolecall.audit(model=model, rows=ROWS, reward=f"{programs}:length", **given)
    assert_all_tools(asked)
    assert found["prompts"].level == "ok"


def test_generate_from_a_file(model, tmp_path, asked):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    how = {"chat_template_kwargs": {"mood": "run's"}, "sampling": {"max_new_tokens": 1}}
    rolecall.generate(model=model, prompts_file=str(tmp_path / "rows.jsonl"), **how)
    assert_all_tools(asked)


def test_episodes_have_the_tools_of_their_environment_and_of_their_row(model, programs, asked):
    rows = [
        {"tools": [WEATHER, CLOCK], "chat_template_kwargs": {"mood": "calm"}},
        {"tools": [WEATHER]},
        {"tools": None},
    ]
    rolecall.play(model=model, env=f"{programs}:Porter", rows=rows, n=3, **SHORT)
    both = ["weather", "clock"]
    assert sorted((names(text), mood(text)) for text in asked) == [(["clock"], ""), (both, ""), (both, "calm")]
    assert [text.count('"name": "clock"') for text in asked] == [1, 1, 1]


def test_episodes_refuse_tools_that_are_none(model, programs):
    with pytest.raises(UserError, match="row 0: `tools` must be a list of JSON schemas"):
        rolecall.play(model=model, env=f"{programs}:Porter", rows=[{"tools": "hammer"}], **SHORT)


def demonstrations(key):
    """The rows as demonstrations, beside what they render to without tools."""
    extra = {"prompt": {"completion": SAID}, "messages": {"messages": ASKED + SAID}}[key]
    return [{**{k: v for k, v in row.items() if k != "prompt" or key == "prompt"}, **extra} for row in ROWS]


@pytest.mark.parametrize("key", ["prompt", "messages"])
def test_sft(model, key):
    policy = load(model)
    found, _ = rendered_rows(demonstrated(demonstrations(key), seed=0), policy, CHAT, max_length=1024)
    assert [names(policy.tokenizer.decode(t.ids)) for t in found] == [["weather"], ["clock"], []]
    assert all(policy.tokenizer.decode(t.ids[slice(*t.turns[0])]) == "yes<|im_end|>" for t in found)


PREFERENCES = [{**row, "chosen": SAID, "rejected": [{"role": "assistant", "content": "no"}]} for row in ROWS]


def test_dpo(model):
    policy = load(model)
    pairs = rendered_pairs(ListRows(PREFERENCES), policy, CHAT, max_length=1024).pairs
    for side in ("chosen", "rejected"):
        texts = [policy.tokenizer.decode(getattr(pair, side).ids) for pair in pairs]
        assert [names(text) for text in texts] == [["weather"], ["clock"], []]


def test_reward_models_read_tools_when_they_train_and_when_they_score(model):
    reward_model = RewardModel.from_policy(load(model), std=0.1)
    pairs = make_pairs(reward_model, ListRows(PREFERENCES), chat=CHAT, max_length=1024).pairs
    assert [names(reward_model.tokenizer.decode(pair.chosen)) for pair in pairs] == [["weather"], ["clock"], []]
    scores = [
        scored.total
        for scored in RewardModelReward(reward_model).score(
            [Sample(prompt=ASKED, completion=SAID, row={"tools": tools}) for tools in ([WEATHER], [CLOCK], None)]
        )
    ]
    assert len(set(scores)) == 3


# -- what cannot be shown is said ------------------------------------------------------------------------------------


@pytest.mark.parametrize("column", ["tools", "chat_template_kwargs"])
def test_plain_text_cannot_show_them(column):
    policy, value = load("tiny"), [WEATHER] if column == "tools" else {"mood": "calm"}
    sentence = f"row 1: .*has `{column}`, which only a chat template can use.*give the prompt as messages"
    with pytest.raises(RowError, match=sentence):
        check_prompts(ListRows([{"prompt": "warm?"}, {"prompt": "warm?", column: value}]), policy, ChatOptions())
    rows = demonstrated([{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": "b", column: value}], seed=0)
    with pytest.raises(RowError, match=sentence.replace("row 1: .*", "row 1 cannot be rendered: it ")):
        rendered_rows(rows, policy, ChatOptions(), max_length=99)


def test_plain_prompts_of_generate(model, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "warm?", "tools": [WEATHER]}))
    with pytest.raises(UserError, match="'warm\\?': it has `tools`"):
        rolecall.generate(model=model, prompts_file=str(tmp_path / "rows.jsonl"), chat=False)


@pytest.mark.parametrize("tools", ["hammer", {"name": "x"}, ["x"], "[1]"])
def test_tools_that_are_none(model, tools):
    with pytest.raises(RowError, match="row 0: `tools` must be a list of JSON schemas"):
        check_prompts(ListRows([{"prompt": ASKED, "tools": tools}]), load(model), ChatOptions())


def test_keys_that_a_table_filled_in_are_left_out(model):
    filled = [{**WEATHER, "function": {**WEATHER["function"], "strict": None}}]
    rows = [{"prompt": ASKED, "tools": tools, "completion": SAID} for tools in (filled, [WEATHER])]
    found, _ = rendered_rows(demonstrated(rows, seed=0), load(model), ChatOptions(), max_length=1024)
    assert found[0].ids == found[1].ids


def test_a_template_without_tools_is_said_once():
    rows = demonstrated([{"prompt": ASKED, "completion": SAID, "tools": [WEATHER]}] * 3, seed=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        rendered_rows(rows, load("tiny"), ChatOptions(), max_length=99)
    assert ["does not show them" in str(w.message) for w in caught] == [True]


def test_a_template_with_tools_is_not_warned_of(model):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rendered_rows(
            demonstrated([{"messages": ASKED + SAID, "tools": [WEATHER]}], seed=0),
            load(model),
            ChatOptions(),
            max_length=1024,
        )
    assert tiny_tokenizer().chat_template != TEMPLATE
