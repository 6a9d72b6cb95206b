"""Chats -> tokens and labels: through the tokenizer's template, with everything but the assistant's words masked."""

from __future__ import annotations

import json
from typing import Any

from tui3090.recipe import IGNORED
from tui3090.rows import BadRow, Row, text

Message = dict[str, str]
ROLES = ("system", "user", "assistant", "tool")


def messages_of(row: Row, messages: str, prompt: str, answer: str) -> list[Message]:
    """The chat in a row: its column `messages`, or else a prompt and an answer. Raises BadRow."""
    if messages not in row and (prompt in row or answer in row):
        return [
            {"role": "user", "content": text(row, prompt, "prompt-column")},
            {"role": "assistant", "content": text(row, answer, "answer-column")},
        ]
    chat = row.get(messages)
    if not isinstance(chat, list) or not chat:
        columns = ", ".join(repr(key) for key in list(row)[:6])
        raise BadRow(
            f"it has no list {messages!r}, and no {prompt!r} and {answer!r}, but {columns or 'nothing'} "
            "(--messages-column, --prompt-column and --answer-column name them)"
        )
    for message in chat:
        if not isinstance(message, dict) or "role" not in message:
            has = ", ".join(map(repr, message)) if isinstance(message, dict) else json.dumps(message, default=repr)[:40]
            raise BadRow(f"a message has no 'role' and 'content' but {has or 'nothing'}")
        if message["role"] not in ROLES:
            raise BadRow(f"a message's role is none of {', '.join(ROLES)} but {str(message['role'])[:40]!r}")
        if not isinstance(message.get("content"), str):
            raise BadRow("a message's content is no text")
    if chat[-1]["role"] != "assistant" or not chat[-1]["content"].strip():
        raise BadRow("its last message is no answer of the assistant's")
    return [{"role": message["role"], "content": message["content"]} for message in chat]


def encode(tokenizer: Any, chat: list[Message], max_length: int) -> tuple[list[int], list[int]]:
    """Token ids of a chat and their labels, at most `max_length`; what the assistant did not say has the label -100.

    A template that rewrites earlier turns leaves the last answer alone to learn from. Raises BadRow where no label is
    left within `max_length`.
    """
    ids = _ids(tokenizer, chat)
    labels = [IGNORED] * len(ids)
    begins = len(ids)
    for number, message in enumerate(chat):
        if message["role"] != "assistant":
            continue
        last = number == len(chat) - 1
        before, until = _ids(tokenizer, chat[:number], asked=True), ids if last else _ids(tokenizer, chat[: number + 1])
        if until == ids[: len(until)] and before == until[: len(before)]:
            labels[len(before) : len(until)] = until[len(before) :]
            begins = min(begins, len(before))
        elif last:
            raise BadRow("the tokenizer's chat template does not begin a chat as it begins its prompt")
    if all(label == IGNORED for label in labels[1:max_length]):
        raise BadRow(f"its prompt alone has {begins} tokens, and --max-length is {max_length}")
    return ids[:max_length], labels[:max_length]


def prompt_ids(tokenizer: Any, chat: list[Message]) -> list[int]:
    """Token ids of a chat that the assistant is to go on with."""
    return _ids(tokenizer, chat, asked=True)


def _ids(tokenizer: Any, chat: list[Message], asked: bool = False) -> list[int]:
    """A chat as tokens; `asked`: up to where the assistant begins to speak."""
    if tokenizer.chat_template:
        given = tokenizer.apply_chat_template(chat, add_generation_prompt=asked, tokenize=True, return_dict=True)
        return list(given["input_ids"])
    if len(chat) > 2 or chat[0]["role"] != "user":
        raise BadRow("the tokenizer has no chat template: give a prompt and an answer alone")
    if tokenizer.eos_token_id is None:
        raise BadRow("the tokenizer has no chat template and no token for a text's end: is it a model that writes?")
    ids = list(tokenizer(chat[0]["content"] + "\n\n")["input_ids"])
    if not asked:
        ids += [*tokenizer(chat[1]["content"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    return ids
