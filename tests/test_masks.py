"""What transformers' models learn about their masks in eager is what they are told under capture."""

from __future__ import annotations

import pytest
import torch
import transformers.masking_utils as asking

from tests.test_transformers import made, rows
from tui3090.techniques.masks import MaskAnswers


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama"])
def test_answers_of_eager_are_given_under_capture(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(name)
    batch = torch.utils.data.default_collate(rows(name, 4))
    del batch["attention_mask"]
    kernels: list[bool] = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def noting(*args: object, attn_mask: object = None, **options: object) -> torch.Tensor:
        kernels.append(attn_mask is None)
        return attention(*args, attn_mask=attn_mask, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noting)

    def run() -> list[bool]:
        kernels.clear()
        model(**batch)
        return list(kernels)

    answers = MaskAnswers(batch)
    with answers.noted():
        eager = run()
    assert eager == [True] * 4, "the fast kernel, without a mask"
    monkeypatch.setattr(asking, "is_tracing", lambda *_: True)  # as under capture

    tracing = asking.is_tracing
    with answers.given():
        assert not asking.is_tracing()
        assert run() == eager
    assert asking.is_tracing is tracing


def test_a_batch_with_a_mask_of_its_own_is_left_alone() -> None:
    batch = torch.utils.data.default_collate(rows("bert", 3))
    tracing = asking.is_tracing
    answers = MaskAnswers(batch)
    with answers.noted(), answers.given():
        assert asking.is_tracing is tracing
    assert MaskAnswers({"input_ids": 1, "position_ids": 2})._module is None
    assert MaskAnswers({"input_ids": 1})._module is asking


def test_other_decisions_on_the_host_are_not_answered() -> None:
    answers = MaskAnswers({"input_ids": 1})
    with answers.noted():
        assert torch.ones(1)
    with answers.given():
        assert not torch.zeros(1), "asked anew: under capture that is an error, which is told"
