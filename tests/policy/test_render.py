"""Roles are drawn as one letter per token: P prompt, C content, S stop, O observation."""

import logging
import warnings

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from rolecall.maths.roles import Role
from rolecall.policy.render import Rendered, continue_conversation, prefix_preserving, render, render_pair
from rolecall.policy.tiny import TURN_END_ID, TURN_START_ID, tiny_tokenizer

TINY = tiny_tokenizer()
LETTERS = {Role.PROMPT: "P", Role.CONTENT: "C", Role.STOP: "S", Role.OBSERVATION: "O"}

STRIPS_THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OPENS_THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
TRIMS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CLOSES = (  # a finished conversation ends with a token that an unfinished one does not have
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}<|pad|>{% endif %}"
)
HEADERS_ONLY = (  # a turn ends where the next one's header begins, and the model stops by writing that header
    "{% for m in messages %}{{ '<|im_start|>' if m.role == 'assistant' else '<|im_end|>' }}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
PLAIN = (
    "{% for m in messages %}{% if m.role == 'user' %}Q: {{ m.content }}\n{% else %}A: {{ m.content }}\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
)


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


def with_template(template):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def draw(rendered):
    return "".join(LETTERS[Role(role)] for role in rendered.roles)


def said(rendered, letter, tokenizer=TINY):
    """The text of all tokens with this role."""
    return tokenizer.decode([i for i, c in zip(rendered.ids, draw(rendered), strict=True) if c == letter])


def merging_tokenizer(template):
    """Letters are bytes, but ": " and " y" are single tokens, so that tokens cross the seams of a template."""
    plain = tiny_tokenizer().backend_tokenizer.to_str()
    vocabulary = {token: i for token, i in Tokenizer.from_str(plain).get_vocab().items() if i < 256}
    vocabulary |= {":Ġ": 256, "Ġy": 257}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[(":", "Ġ"), ("Ġ", "y")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=template)


CHAT = [user("hi"), assistant("yo"), user("and?"), assistant("so")]


def test_text_to_be_answered_is_all_prompt():
    rendered = render(TINY, CHAT[:3])
    assert set(draw(rendered)) == {"P"}
    assert rendered.turns == ()
    assert TINY.decode(rendered.ids).endswith("and?<|im_end|>\n<|im_start|>assistant\n")


def test_sampled_trains_nothing_even_with_assistant_messages():
    assert set(draw(render(TINY, CHAT))) == {"P"}


def test_every_assistant_message_trains_with_its_stop_but_not_its_frame():
    rendered = render(TINY, CHAT, train="assistant")
    #                      <|im_start|>user\nhi<|im_end|>\n   <|im_start|>assistant\n   yo S \n
    one_turn = "P" * (1 + 5 + 2 + 2) + "P" * (1 + 10) + "CC" + "S" + "P"
    two_turn = "P" * (1 + 5 + 4 + 2) + "P" * (1 + 10) + "CC" + "S" + "P"
    assert draw(rendered) == one_turn + two_turn
    assert rendered.turns == ((21, 24), (48, 51))
    assert [rendered.ids[end - 1] for _, end in rendered.turns] == [TURN_END_ID] * 2


def test_only_the_last_assistant_message_trains():
    rendered = render(TINY, CHAT, train="last_assistant")
    assert said(rendered, "C") == "so"
    assert draw(rendered).count("S") == 1


def test_ids_are_those_of_the_template():
    whole = TINY.apply_chat_template(CHAT)["input_ids"]
    assert list(render(TINY, CHAT, train="assistant").ids) == whole


@pytest.mark.parametrize(("messages", "asks"), [(CHAT[:3], True), (CHAT, False)])
def test_generation_prompt_follows_unless_the_assistant_spoke_last(messages, asks):
    assert TINY.decode(render(TINY, messages).ids).endswith("<|im_start|>assistant\n") == asks
    forced = render(TINY, messages, add_generation_prompt=not asks)
    assert TINY.decode(forced.ids).endswith("<|im_start|>assistant\n") != asks


def test_a_stop_token_in_somebodys_text_is_not_the_end_of_a_turn():
    chat = [user("a<|im_end|>b"), assistant("c<|im_end|>d")]
    rendered = render(TINY, chat, train="assistant")
    assert said(rendered, "C") == "c<|im_end|>d"
    assert draw(rendered).endswith("CCCSP")
    answers_only = "{% for m in messages if m.role == 'assistant' %}{{ m.content }}<|im_end|>{% endfor %}"
    assert draw(render(with_template(answers_only), chat, train="assistant")) == "CCCS"


def test_the_same_words_in_question_and_answer():
    rendered = render(
        TINY, [user("assistant"), assistant("assistant"), user("user"), assistant("user")], train="assistant"
    )
    assert said(rendered, "C") == "assistantuser"
    assert len(rendered.turns) == 2


def test_an_empty_answer_is_only_its_stop():
    rendered = render(TINY, [user("hi"), assistant("")], train="assistant")
    assert draw(rendered).endswith("PSP")
    assert "C" not in draw(rendered)


def test_two_stop_ids():
    gemma_like = with_template(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|pad|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    only_eos = render(gemma_like, CHAT[:2], train="assistant")
    both = render(gemma_like, CHAT[:2], train="assistant", stop_ids=(TURN_END_ID, 256))
    assert draw(only_eos).endswith("CCPP")
    assert draw(both).endswith("CCSP")


def test_pad_equal_to_eos_changes_nothing():
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    assert render(tokenizer, CHAT, train="assistant") == render(TINY, CHAT, train="assistant")


def test_a_template_that_trims():
    rendered = render(with_template(TRIMS), [user(" hi "), assistant("  yo  ")], train="assistant")
    assert said(rendered, "C") == "yo"
    assert draw(rendered).endswith("PCCSP")


def test_characters_of_several_bytes():
    rendered = render(TINY, [user("é"), assistant("ñ€")], train="assistant")
    assert said(rendered, "C") == "ñ€"
    assert draw(rendered).count("C") == 5


def test_a_token_across_the_seam_belongs_to_the_template():
    tokenizer = merging_tokenizer(
        "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
    )
    rendered = render(tokenizer, [user("x"), assistant(" no")], train="assistant")
    # u : x \n a ": " n o \n      the space is the answer's, but it shares a token with the colon
    assert [tokenizer.decode([i]) for i in rendered.ids] == ["u", ":", "x", "\n", "a", ": ", "n", "o", "\n"]
    assert draw(rendered) == "PPPPPPCCP"


def test_a_template_without_stop_token_has_no_stop():
    rendered = render(with_template(PLAIN), [user("x"), assistant("y")], train="assistant")
    assert TINY.decode(rendered.ids) == "Q: x\nA: y\n"
    assert draw(rendered) == "PPPPPPPCCP"


def test_system_prompt_goes_first_unless_there_is_one():
    assert "system\nbe kind" in TINY.decode(render(TINY, CHAT, system_prompt="be kind").ids)
    own = [{"role": "system", "content": "be brief"}, *CHAT]
    assert render(TINY, own, system_prompt="be kind") == render(TINY, own)


def test_template_options_reach_the_template():
    tokenizer = with_template("{% if loud %}LOUD{% endif %}{{ messages[0].content }}")
    assert TINY.decode(render(tokenizer, [user("hi")], chat_template_kwargs={"loud": True}).ids) == "LOUDhi"


def test_plain_text():
    rendered = render(TINY, "1+1=")
    assert rendered.ids == tuple(b"1+1=")
    assert draw(rendered) == "PPPP"


def test_plain_text_gets_the_start_token_but_no_end_token():
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 257), ("<|im_end|>", 258)]
    )
    assert render(tokenizer, "ab").ids == (TURN_START_ID, 97, 98)
    assert render(tokenizer, "ab<|im_end|>").ids == (TURN_START_ID, 97, 98, TURN_END_ID)
    assert render_pair(tokenizer, "a", "b").ids == (TURN_START_ID, 97, 98, TURN_END_ID)


@pytest.mark.parametrize("text", ["a long text", CHAT])
def test_what_is_too_long_is_for_the_caller_to_say(text, caplog, monkeypatch):
    """The tokenizer's own warning would come before that sentence."""
    tokenizer = tiny_tokenizer()
    tokenizer.model_max_length = 3
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A <|im_end|>", special_tokens=[("<|im_end|>", TURN_END_ID)]
    )
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    assert len(render(tokenizer, text).ids) > 3
    assert caplog.records == []


def test_messages_without_template_say_what_to_do():
    with pytest.raises(ValueError, match="give prompts as plain text"):
        render(with_template(None), CHAT)


@pytest.mark.parametrize(
    ("messages", "options", "match"),
    [
        ("text", {"system_prompt": "x"}, "needs messages"),
        ("text", {"train": "assistant"}, "render_pair"),
        (CHAT, {"train": "all"}, "unknown train 'all'"),
        ([], {}, "no messages"),
        ([assistant("hi")], {"train": "assistant"}, "begins with the assistant"),
    ],
)
def test_wrong_calls(messages, options, match):
    with pytest.raises(ValueError, match=match):
        render(TINY, messages, **options)


def test_pair_of_texts():
    rendered = render_pair(TINY, "1+1=", "2")
    assert rendered.ids == (*b"1+1=2", TURN_END_ID)
    assert draw(rendered) == "PPPPCS"
    assert rendered.turns == ((4, 6),)


def test_pair_of_texts_keeps_the_prompts_own_ids():
    tokenizer = merging_tokenizer(None)
    rendered = render_pair(tokenizer, "a:", " no", stop_ids=(258,))
    assert rendered.ids == (97, 58, 32, 110, 111, 258)  # not the single token ": "
    assert draw(rendered) == "PPCCCS"


def test_pair_needs_a_stop_id():
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="pass stop_ids"):
        render_pair(tokenizer, "a", "b")


@pytest.mark.parametrize(
    ("prompt", "completion"), [([user("hi")], [assistant("yo")]), ("hi", [assistant("yo")]), ([user("hi")], "yo")]
)
def test_pair_with_messages(prompt, completion):
    assert render_pair(TINY, prompt, completion) == render(TINY, CHAT[:2], train="assistant")


def test_pair_trains_the_completion_only():
    rendered = render_pair(TINY, CHAT[:2], [user("x"), assistant("A"), user("y"), assistant("B")])
    assert said(rendered, "C") == "AB"


def test_pair_without_assistant():
    with pytest.raises(ValueError, match="no assistant message"):
        render_pair(TINY, "hi", [user("x")])


# What was sampled, and what is appended to it


def sampled(messages, answer_ids, *, stopped=True):
    """A prompt and the ids an engine drew for it."""
    prompt = render(TINY, messages)
    roles = [Role.CONTENT] * len(answer_ids)
    if stopped:
        roles[-1] = Role.STOP
    return (*prompt.ids, *answer_ids), (*prompt.roles, *map(int, roles))


def test_the_next_turn_is_appended():
    ids, roles = sampled([user("hi")], (*b"yo", TURN_END_ID))
    after = continue_conversation(TINY, ids, roles, [user("and?")], history=CHAT[:2])
    assert after.ids == render(TINY, CHAT[:3]).ids
    assert draw(after)[len(ids) :] == "P" + "P" * 6 + "OOOO" + "PP" + "P" * 11
    assert said(after, "O") == "and?"
    assert after.turns == ((21, 24),)
    assert not after.new_sample


def test_sampled_ids_are_never_encoded_again():
    odd = (300, 7, 7, 301)  # no text encodes to these
    prompt = render(TINY, [user("hi")])
    ids, roles = (*prompt.ids, *odd), (*prompt.roles, 2, 2, 2, 3)
    after = continue_conversation(TINY, ids, roles, [user("x")], history=[user("hi"), assistant("??")])
    assert after.ids[: len(ids)] == ids
    assert after.roles[: len(roles)] == roles
    assert TINY.decode(after.ids[len(ids) :]) == "\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"


def test_an_answer_that_was_cut_off_is_closed_but_not_by_the_policy():
    ids, roles = sampled([user("hi")], tuple(b"yo"), stopped=False)
    after = continue_conversation(TINY, ids, roles, [user("and?")], history=CHAT[:2])
    assert after.ids == render(TINY, CHAT[:3]).ids
    assert after.ids[len(ids)] == TURN_END_ID
    assert after.roles[len(ids)] == Role.PROMPT


def test_several_messages_and_words_of_the_template_in_them():
    ids, roles = sampled([user("hi")], (*b"yo", TURN_END_ID))
    new = [{"role": "tool", "content": "tool"}, user("user\n")]
    after = continue_conversation(TINY, ids, roles, new, history=CHAT[:2])
    assert said(after, "O") == "tooluser\n"
    frame = "\n<|im_start|>tool\n<|im_end|>\n<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"
    assert said(after, "P").endswith(frame)


def test_trimmed_observations():
    tokenizer = with_template(TRIMS)
    ids, roles = sampled([user("hi")], (*b"yo", TURN_END_ID))
    after = continue_conversation(tokenizer, ids, roles, [user("  and?\n")], history=CHAT[:2])
    assert said(after, "O") == "and?"


def test_a_template_that_looks_into_the_content_counts_all_new_text_as_said():
    tokenizer = with_template(TINY.chat_template.replace("message['content']", "message['content'].upper()"))
    ids, roles = sampled([user("hi")], (*b"yo", TURN_END_ID))
    after = continue_conversation(tokenizer, ids, roles, [user("and?")], history=CHAT[:2])
    assert "AND?" in said(after, "O")
    assert set(draw(after)[len(ids) + 1 :]) == {"O"}


def test_three_turns_equal_one_rendering():
    chat = [user("a")]
    ids, roles = render(TINY, chat).ids, render(TINY, chat).roles
    for answer, question in (("b", "c"), ("d", "e"), ("f", "g")):
        ids, roles = (*ids, *answer.encode(), TURN_END_ID), (*roles, int(Role.CONTENT), int(Role.STOP))
        chat.append(assistant(answer))
        after = continue_conversation(TINY, ids, roles, [user(question)], history=chat)
        chat.append(user(question))
        ids, roles = after.ids, after.roles
    assert ids == render(TINY, chat).ids
    whole = render(TINY, chat, train="assistant")
    assert after.turns == whole.turns
    assert draw(after).replace("O", "P") == draw(whole)


def test_a_template_that_closes_finished_conversations_still_only_appends():
    tokenizer = with_template(CLOSES)
    assert prefix_preserving(tokenizer)
    assert said(render(tokenizer, CHAT, train="assistant"), "C") == "yoso"
    ids, roles = sampled([user("hi")], (*b"yo", TURN_END_ID))
    after = continue_conversation(tokenizer, ids, roles, [user("and?")], history=CHAT[:2])
    assert after.ids == render(tokenizer, CHAT[:3]).ids
    assert said(after, "O") == "and?"


def test_a_stop_id_that_is_the_next_header_is_not_written_twice():
    tokenizer = with_template(HEADERS_ONLY)
    prompt = render(tokenizer, [user("hi")])
    ids, roles = (*prompt.ids, *b"yo", TURN_END_ID), (*prompt.roles, 2, 2, 3)
    after = continue_conversation(tokenizer, ids, roles, [user("and?")], history=CHAT[:2])
    assert after.ids == render(tokenizer, CHAT[:3]).ids
    assert said(after, "O") == "and?"


def test_history_must_end_with_the_sampled_answer():
    with pytest.raises(ValueError, match="must end with the assistant"):
        continue_conversation(TINY, (1,), (1,), [user("x")], history=[user("hi")])


# Templates that rewrite the past


def test_prefix_preserving_says_where_it_breaks():
    assert prefix_preserving(TINY)
    assert prefix_preserving(with_template(TRIMS))
    report = prefix_preserving(with_template(STRIPS_THINKING))
    assert not report
    assert report.message == 2
    assert report.before.startswith("<think>")
    assert report.after.startswith("\n\nFirst answer")


def test_prefix_preserving_without_any_stop_token():
    assert prefix_preserving(with_template(PLAIN))
    strips = PLAIN.replace(
        "A: {{ m.content }}", "A: {{ m.content.split('</think>')[-1] if not loop.last else m.content.upper() }}"
    )
    assert not prefix_preserving(with_template(strips))


def test_a_generation_prompt_that_the_answer_lacks_breaks_the_prefix():
    assert prefix_preserving(with_template(OPENS_THINKING), [user("a"), assistant("b")]).message == 1


THOUGHTS = [user("hi"), assistant("<think>x</think>yo"), user("and?"), assistant("<think>z</think>so")]


def test_rewritten_turns_do_not_train_and_it_is_said_once():
    with pytest.warns(UserWarning, match="rewrites earlier turns") as caught:
        rendered = render(with_template(STRIPS_THINKING), THOUGHTS, train="assistant")
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert said(rendered, "C") == "<think>z</think>so"


def test_the_last_turn_trains_under_such_a_template_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rendered = render(with_template(STRIPS_THINKING), THOUGHTS, train="last_assistant")
    assert said(rendered, "C") == "<think>z</think>so"


def test_an_answer_behind_a_generation_prompt_it_lacks():
    with pytest.warns(UserWarning, match="which the finished message lacks") as caught:
        rendered = render(with_template(OPENS_THINKING), CHAT[:2], train="assistant")
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert said(rendered, "C") == "yo"


def test_a_conversation_goes_on_as_a_new_sample():
    tokenizer = with_template(STRIPS_THINKING)
    ids, roles = sampled([user("hi")], (*b"<think>x</think>yo", TURN_END_ID))
    with pytest.warns(UserWarning, match="rewrites") as caught:
        after = continue_conversation(tokenizer, ids, roles, [user("and?")], history=THOUGHTS[:2])
    assert caught[0].filename == __file__
    assert after.new_sample
    assert after.ids == render(tokenizer, THOUGHTS[:3]).ids
    assert draw(after)[:21] == "P" * 21
    assert set(draw(after)[21:]) == {"O"}
    assert after.turns == ()


def test_a_record_with_unequal_lengths_cannot_be_made():
    with pytest.raises(ValueError, match="2 ids but 1 roles"):
        Rendered(ids=(1, 2), roles=(1,))


def test_a_tokenizer_that_adds_a_start_token_adds_none_to_what_the_template_wrote():
    plain, adding = tiny_tokenizer(), tiny_tokenizer()
    start = adding.convert_tokens_to_ids("<|im_start|>")
    adding.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", start)]
    )
    assert adding("a")["input_ids"][0] == start
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    found = [render(tokenizer, messages, train="assistant", stop_ids=(258,)) for tokenizer in (plain, adding)]
    assert found[0].ids == found[1].ids
    assert found[0].roles == found[1].roles
