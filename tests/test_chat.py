"""Chats as tokens: the template's own, with labels on what the assistant says and on nothing else."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest

from tui3090 import chat
from tui3090.recipe import IGNORED
from tui3090.rows import BadRow

ASKED = "{% if add_generation_prompt %}<assistant>{% endif %}"
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}$ {% endfor %}" + ASKED
FORGETFUL = (  # like templates that drop what the assistant thought in earlier turns
    "{% for m in messages %}<{{ m['role'] }}>"
    "{{ m['content'] if loop.last or m['role'] != 'assistant' else m['content'][:1] }}$ {% endfor %}" + ASKED
)
TURNS = [
    {"role": "system", "content": "be short"},
    {"role": "user", "content": "one?"},
    {"role": "assistant", "content": "uno"},
    {"role": "user", "content": "two?"},
    {"role": "assistant", "content": "dos"},
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """A token is a byte, `$` ends."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="$")


def learned(tokenizer: Any, messages: list[chat.Message], max_length: int = 500) -> tuple[str, str]:
    """The whole chat, and its labels with the masked ones as dots."""
    ids, labels = chat.encode(tokenizer, messages, max_length)
    assert len(ids) == len(labels)
    assert all(label in (IGNORED, token) for token, label in zip(ids, labels))
    shown = "".join("." if label == IGNORED else tokenizer.decode([label]) for label in labels)
    return tokenizer.decode(ids), shown


def test_every_answer_is_learned_and_nothing_else(tokenizer: Any) -> None:
    tokenizer.chat_template = TEMPLATE
    whole, labels = learned(tokenizer, TURNS)
    assert whole == "<system>be short$ <user>one?$ <assistant>uno$ <user>two?$ <assistant>dos$ "
    assert labels == re.sub("[^~]", ".", "<system>be short$ <user>one?$ <assistant>") + "uno$ " + (
        "." * len("<user>two?$ <assistant>") + "dos$ "
    )


def test_a_template_that_rewrites_earlier_turns_leaves_the_last_answer(tokenizer: Any) -> None:
    tokenizer.chat_template = FORGETFUL
    whole, labels = learned(tokenizer, TURNS)
    assert whole.endswith("<assistant>dos$ ")
    assert labels.strip(".") == "dos$ "


def test_a_template_whose_prompt_is_not_what_its_chats_begin_with_is_no_good(tokenizer: Any) -> None:
    tokenizer.chat_template = TEMPLATE.replace("<assistant>", "<other>")
    with pytest.raises(BadRow, match="does not begin a chat as it begins its prompt"):
        chat.encode(tokenizer, TURNS, 500)


def test_a_chat_is_cut_and_refused_when_nothing_to_learn_is_left(tokenizer: Any) -> None:
    tokenizer.chat_template = TEMPLATE
    begins = len("<system>be short$ <user>one?$ <assistant>")
    whole, labels = learned(tokenizer, TURNS, begins + 2)
    assert (len(whole), labels.strip(".")) == (begins + 2, "un")
    with pytest.raises(BadRow, match=f"its prompt alone has {begins} tokens, and --max-length is {begins}"):
        chat.encode(tokenizer, TURNS, begins)


def test_without_a_template_an_answer_follows_its_prompt_and_ends(tokenizer: Any) -> None:
    tokenizer.chat_template = None
    assert learned(tokenizer, TURNS[1:3]) == ("one?\n\nuno$", "......uno$")
    assert tokenizer.decode(chat.prompt_ids(tokenizer, TURNS[1:2])) == "one?\n\n"
    with pytest.raises(BadRow, match="no chat template: give a prompt and an answer alone"):
        chat.encode(tokenizer, TURNS, 500)
    endless = copy.deepcopy(tokenizer)
    endless.eos_token = None
    with pytest.raises(BadRow, match="no token for a text's end: is it a model that writes"):
        chat.encode(endless, TURNS[1:3], 500)


def test_rows_with_messages_or_a_prompt_and_an_answer() -> None:
    def read(row: dict[str, Any]) -> list[chat.Message]:
        return chat.messages_of(row, "messages", "prompt", "answer")

    assert read({"messages": TURNS, "id": 1}) == TURNS
    assert read({"prompt": "one?", "answer": "uno"}) == TURNS[1:3]
    for row, why in [
        ({"prompt": "one?"}, "it has no 'answer' but 'prompt'"),
        ({"chat": TURNS}, "it has no list 'messages', and no 'prompt' and 'answer', but 'chat'"),
        ({"messages": []}, "it has no list 'messages'"),
        ({"messages": TURNS[:2]}, "its last message is no answer"),
        (
            {"messages": [{"role": "bot", "content": "hi"}]},
            "a message's role is none of system, user, assistant, tool but 'bot'",
        ),
        ({"messages": [{"from": "gpt", "value": "hi"}]}, "a message has no 'role' and 'content' but 'from', 'value'"),
        ({"messages": ["hi"]}, "a message has no 'role' and 'content' but \"hi\""),
        ({"messages": [{"role": "user", "content": None}]}, "a message's content is no text"),
    ]:
        with pytest.raises(BadRow, match=re.escape(why)):
            read(row)
