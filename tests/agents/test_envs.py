"""The built-in environments, tool calls, adapters, and their names."""

import asyncio
import json
from fractions import Fraction
from importlib.util import find_spec
from itertools import product

import pytest

from rolecall.agents.adapters import OneTurn, TRLEnv
from rolecall.agents.environments import as_factory, check_name, open_env
from rolecall.agents.replies import first_reply, next_reply, players_of
from rolecall.tasks.env import EnvError
from rolecall.tasks.kuhn import DEALS, decisions, exploitability, game_value, pays
from rolecall.tasks.names import find_task, resolve
from rolecall.tasks.rows import RowError
from rolecall.tasks.tools import answer_calls, find_calls


def said(text):
    return {"role": "assistant", "content": text}


# -- tool calls -----------------------------------------------------------------------------------------------------


def add(a: int, b: int = 1) -> int:
    """Adds."""
    return a + b


@pytest.mark.parametrize(
    ("text", "answer", "well"),
    [
        ('<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>', "5", True),
        ('I think <tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>', "3", True),
        ('<tool_call>{"name": "add", "arguments": {"a": 2}', "error: a tool call was not closed", False),
        ("<tool_call>add 2 3</tool_call>", "error: the tool call is not JSON", False),
        ('<tool_call>["add"]</tool_call>', "error: a tool call needs", False),
        ('<tool_call>{"name": "add", "arguments": [2]}</tool_call>', "error: the arguments of a tool call must", False),
        ('<tool_call>{"name": "sum", "arguments": {}}</tool_call>', "error: there is no tool 'sum'", False),
        ('<tool_call>{"name": "adds", "arguments": {}}</tool_call>', "did you mean add?", False),
        ('<tool_call>{"name": "add", "arguments": {"c": 2}}</tool_call>', "error: missing a required argument", False),
        ('<tool_call>{"name": "add", "arguments": {"a": "x"}}</tool_call>', "error: ", False),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "error: the tool call is not JSON", False),
        ("<shout>hi</shout>", "HI", True),
        ("<shout>hi", "error: the call was not closed with </shout>", False),
    ],
)
def test_a_call_is_answered_whatever_it_is(text, answer, well):
    tools = {"add": add, "shout": str.upper}
    (call,) = find_calls(text, ("shout",))
    if call.name == "shout":
        tools["shout"] = lambda text: text.upper()
    ((message, went_well),) = answer_calls([call], tools)
    assert message["role"] == "tool"
    assert answer in message["content"]
    assert went_well == well


def test_calls_are_found_in_order_and_plain_text_is_none():
    text = '<calc>1</calc><tool_call>{"name": "b"}</tool_call><calc>2</calc>'
    assert [(call.name, call.arguments) for call in find_calls(text, ("calc",))] == [
        ("calc", {"": "1"}), ("b", {}), ("calc", {"": "2"})]  # fmt: skip
    assert find_calls("1 < 2 > 0 </calc>", ("calc",)) == []


# -- the built-in tasks ---------------------------------------------------------------------------------------------


def outcome(task, row, *texts):
    """(messages heard, reward, done) after each of the policy's messages."""
    env = task.env()
    first_reply(env, row, 0)
    replies = [next_reply(env, said(text)) for text in texts]
    return [([m["content"] for m in r.messages.get("agent", ())], r.rewards.get("agent"), r.done) for r in replies]


def test_the_calculator_calculates_and_scores_the_answer():
    task = find_task("calculator:digits=3")
    row = {"prompt": [{"role": "user", "content": "12*34"}], "answer": "408"}
    assert outcome(task, row, "<calc>12*34</calc>", " 408\n") == [(["408"], None, False), ([], 1.0, True)]
    assert outcome(task, row, "407") == [([], 0.0, True)]
    assert outcome(task, row, "<calc>1/0</calc>")[0][0] == ["error: not arithmetic: a division by zero"]
    assert outcome(task, row, "<calc>__import__('os')</calc>")[0][0][0].startswith("error: not arithmetic")


def test_the_guessing_game_tells_where_to_go_and_ends():
    task, row = find_task("guessing:high=15,tries=4"), {"secret": 5}
    assert outcome(task, {**row, "prompt": "go"}, "8", "4", "x", "5") == [
        (["lower"], None, False), (["higher"], None, False), (["a number"], None, False), ([], 1.0, True)]  # fmt: skip
    assert outcome(task, {**row, "prompt": "go"}, "1", "1", "1", "1")[-1] == ([], 0.0, True)


def test_halving_finds_every_number():
    task = find_task("guessing:high=15,tries=4")
    for secret in range(1, 16):
        env, low, high = task.env(), 1, 15
        first_reply(env, {"prompt": "go", "secret": secret}, 0)
        for _ in range(4):
            guess = (low + high) // 2
            reply = next_reply(env, said(str(guess)))
            if reply.done:
                break
            low, high = (guess + 1, high) if reply.messages["agent"][0]["content"] == "higher" else (low, guess - 1)
        assert reply.rewards == {"agent": 1.0}


@pytest.mark.parametrize("name", ["calculator", "guessing", "kuhn"])
def test_demonstrations_are_what_the_environment_would_have_said(name):
    task = find_task(name)
    for row in task.rows("train", n=40, seed=3):
        env, gold, heard = task.env(), list(task.gold(row)), []
        first = first_reply(env, row, 0)
        assert first.messages.get(row.get("player", "agent")) == [dict(m) for m in row["prompt"]]
        player, done = first.speaker, False
        for message in gold:
            if message["role"] == "assistant":
                assert not done
                reply = next_reply(env, message)
                done, heard = reply.done, [m["content"] for m in reply.messages.get(player, ())]
            elif name == "kuhn":
                reply = next_reply(env, said(message["content"]))  # the other side
            else:
                assert message["content"] in heard
        if name == "calculator":
            assert reply.rewards == {"agent": 1.0}


@pytest.mark.parametrize("name", ["calculator", "guessing", "kuhn"])
def test_the_same_seed_gives_the_same_rows(name):
    task = resolve(name)
    assert list(task.rows("train", n=5, seed=1)) == list(task.rows("train", n=5, seed=1))
    assert list(task.rows("train", n=5, seed=1)) != list(task.rows("train", n=5, seed=2))


def test_products_that_are_held_out_are_not_trained_on():
    task = find_task("calculator")
    train, test = ({row["prompt"][0]["content"] for row in task.rows(s, n=2000)} for s in ("train", "test"))
    assert test
    assert not train & test


# -- Kuhn poker -----------------------------------------------------------------------------------------------------


def equilibrium(alpha):
    """Kuhn's family: the first player bluffs with the lowest card alpha of the time, 0 to 1/3."""
    third = Fraction(1, 3)
    first = {("J", ""): alpha, ("Q", ""): 0, ("K", ""): 3 * alpha}
    first |= {("J", "pb"): 0, ("Q", "pb"): alpha + third, ("K", "pb"): 1}
    second = {("J", "p"): third, ("Q", "p"): 0, ("K", "p"): 1, ("J", "b"): 0, ("Q", "b"): third, ("K", "b"): 1}
    return {("first", *k): Fraction(v) for k, v in first.items()} | {
        ("second", *k): Fraction(v) for k, v in second.items()
    }


@pytest.mark.parametrize("alpha", [Fraction(0), Fraction(1, 6), Fraction(1, 3)])
def test_the_value_of_kuhn_poker_is_minus_one_eighteenth_and_its_equilibria_cannot_be_exploited(alpha):
    assert game_value(equilibrium(alpha)) == Fraction(-1, 18)
    assert exploitability(equilibrium(alpha)) == 0


def test_a_strategy_that_is_no_equilibrium_can_be_exploited():
    coin = dict.fromkeys((d for player in ("first", "second") for d in decisions(player)), Fraction(1, 2))
    assert game_value(coin) == Fraction(1, 8)
    assert exploitability(coin) > Fraction(2, 5)
    never = dict.fromkeys(coin, 0)
    assert exploitability(never) > 0


@pytest.mark.parametrize("deal", DEALS)
def test_the_game_pays_what_the_rules_say(deal):
    for words in product(("pass", "bet"), repeat=3):
        env, spoken = find_task("kuhn").env(), ""
        reply = first_reply(env, {"deal": deal}, 0)
        assert {p: m[0]["content"][-1] for p, m in reply.messages.items()} == {"first": deal[0], "second": deal[1]}
        for word in words:
            reply = next_reply(env, said(word))
            spoken += word[0]
            if reply.done:
                break
        won = pays(deal, spoken)
        assert reply.done
        assert reply.rewards == {"first": won, "second": -won}


def test_an_illegal_move_costs_its_own_side_only():
    env = find_task("kuhn").env()
    assert players_of(env) == ("first", "second")
    first_reply(env, {"deal": "KQ"}, 0)
    reply = next_reply(env, said("raise"))
    assert (reply.done, reply.rewards, reply.counts) == (True, {"first": -2.0, "second": 0.0}, {"illegal_moves": 1.0})


# -- adapters -------------------------------------------------------------------------------------------------------


gym = pytest.mark.skipif(find_spec("gymnasium") is None, reason="needs gymnasium")


class Counter:
    """As TRL takes it: made without arguments, tools by their public methods."""

    def __init__(self):
        self.value, self.reward = 0, 0.0

    def reset(self, **kwargs) -> str | None:
        self.goal = kwargs["goal"]
        return f" Count to {self.goal}."

    def increment(self, step: int) -> str:
        """Add to the counter.

        Args:
            step: How much to add.

        Returns:
            The counter's value.
        """
        if step > 5:
            raise ValueError("at most 5")
        self.value += step
        self.reward = float(self.value == self.goal)
        return f"Counter: {self.value}"

    def _hidden(self):
        raise AssertionError


def test_a_class_of_trls_kind_is_used_unchanged():
    env = as_factory(Counter)()
    assert isinstance(env, TRLEnv)
    first = first_reply(env, {"prompt": [{"role": "user", "content": "Play."}], "goal": 4}, 0)
    assert first.messages["agent"] == [{"role": "user", "content": "Play. Count to 4."}]
    call = '<tool_call>{"name": "increment", "arguments": {"step": %d}}</tool_call>'
    assert next_reply(env, said(call % 9)).messages["agent"][0]["content"] == "error: at most 5"
    reply = next_reply(env, said(call % 4))
    assert (reply.messages["agent"][0]["content"], reply.counts["tool_failures"]) == ("Counter: 4", 0)
    last = next_reply(env, said("Done."))
    assert (last.done, last.rewards) == (True, {"agent": 1.0})
    assert last.view == {"value": 4, "goal": 4, "reward": 1.0}, "what reward functions that ask for environments see"


def test_the_tools_of_trls_kind_are_described_for_the_chat_template():
    (schema,) = TRLEnv(Counter).tools
    assert schema["function"]["name"] == "increment"
    assert schema["function"]["parameters"]["properties"]["step"] == {
        "type": "integer",
        "description": "How much to add.",
    }


def test_get_reward_comes_before_the_attribute():
    class Own(Counter):
        def get_reward(self):
            return 0.25

    env = TRLEnv(Own)
    first_reply(env, {"prompt": "Play.", "goal": 1}, 0)
    assert next_reply(env, said("no call")).rewards == {"agent": 0.25}
    assert env.final_reward() == 0.25


def test_methods_and_tools_may_be_async_and_share_a_loop():
    class Waits(Counter):
        async def reset(self, **kwargs):
            self.loop = asyncio.get_running_loop()
            return super().reset(**kwargs)

        async def twice(self, step: int) -> str:
            await asyncio.sleep(0)
            assert asyncio.get_running_loop() is self.loop
            return self.increment(2 * step)

        async def get_reward(self):
            await asyncio.sleep(0)
            return self.reward / 2

        @property
        def trap(self):
            raise AssertionError("no property is asked for")

    async def add(a: int, b: int) -> int:
        """Add.

        Args:
            a: One.
            b: Other.
        """
        return a + b

    here, there = asyncio.Event(), asyncio.Event()

    async def meet(first: bool) -> str:
        """Return when the other call is there too.

        Args:
            first: Which of the two.
        """
        mine, other = (here, there) if first else (there, here)
        mine.set()
        await asyncio.wait_for(other.wait(), 30)
        return "met"

    env = TRLEnv(Waits, {"add": add, "meet": meet})
    assert list(env._tools) == ["add", "meet", "increment", "twice"]
    first_reply(env, {"prompt": "Play.", "goal": 4}, 0)
    calls = [("twice", {"step": 2}), ("add", {"a": 2, "b": 3}), ("twice", {"step": 9})]
    calls += [("meet", {"first": True}), ("meet", {"first": False})]
    text = "".join(f"<tool_call>{json.dumps({'name': n, 'arguments': a})}</tool_call>" for n, a in calls)
    reply = next_reply(env, said(text))
    assert [m["content"] for m in reply.messages["agent"]] == ["Counter: 4", "5", "error: at most 5", "met", "met"]
    assert next_reply(env, said("Done.")).rewards == {"agent": 0.5}


def test_a_task_of_one_answer_is_an_environment_of_one_turn():
    task = find_task("addition")
    row = task.rows("test", n=1)[0]
    env = OneTurn(task)
    assert first_reply(env, row, 0).messages["agent"] == [{"role": "user", "content": row["prompt"]}]
    reply = next_reply(env, said(row["answer"]))
    assert (reply.done, reply.rewards) == (True, {"agent": 1.0})


def test_reasoning_gym_is_an_environment_of_one_turn():
    pytest.importorskip("reasoning_gym")
    task = find_task("rg:chain_sum")
    row = task.rows("test", n=1)[0]
    env = open_env("rg:chain_sum")()
    first_reply(env, row, 0)
    assert next_reply(env, said(row["answer"])).rewards == {"agent": 1.0}


# -- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("calculater", "did you mean 'calculator'"),
        ("nothing-like-it", "there are calculator, guessing, kuhn, addition"),
        ("no-such-file.py:Env", "there is no file"),
        ("trl:nothing", "there is no environment 'nothing'"),
        pytest.param("gym:FrozenLake-v9", "did you mean 'gym:FrozenLake-v1'", marks=gym),
        pytest.param("gym:Pendulum-v1", "only Discrete and Text", marks=gym),
    ],
)
def test_a_name_that_stands_for_nothing_is_a_sentence(name, wrong):
    with pytest.raises(EnvError, match=wrong):
        check_name(name)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("guessing:hi=3", "did you mean `high`"),
        ("guessing:high=x", "must be a whole number"),
        ("guessing:high=1", "high must lie in"),
        ("calculator:digits=99", "digits must lie in"),
        ("kuhn:cards=4", "it has none"),
    ],
)
def test_options_are_checked(name, wrong):
    with pytest.raises(RowError, match=wrong):
        check_name(name)


def test_your_own_class_is_found_by_file(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from rolecall.tasks.env import Step\n"
        "class Mine:\n"
        "    def reset(self, row, seed): return 'go'\n"
        "    def step(self, message): return Step(reward=1.0, done=True)\n"
    )
    env = open_env(f"{tmp_path / 'mine.py'}:Mine")()
    assert first_reply(env, {}, 0).messages["agent"][0]["content"] == "go"
