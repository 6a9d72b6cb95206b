"""Checkpointing on a card: the recomputation draws the dropout that the forward drew, however blocks are called."""

from __future__ import annotations

import pytest
import torch

from tests.test_checkpointing import ByKeyword
from tui3090.techniques.checkpointing import Checkpointing

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"), pytest.mark.timeout(120)]


def test_a_block_that_takes_its_input_by_keyword_draws_the_same_dropout(deterministic: None) -> None:
    torch.manual_seed(0)
    blocks = torch.nn.ModuleList(ByKeyword() for _ in range(3)).cuda()
    x, mask = torch.randn(64, 4, device="cuda"), torch.ones(64, 1, device="cuda")

    def run(every: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        torch.manual_seed(1)
        blocks.zero_grad()
        with Checkpointing(blocks, list(blocks)).in_force(every):
            hidden = x
            for block in blocks:
                hidden, _ = block(hidden=hidden, mask=mask, context_fn=2.0)
            hidden.sum().backward()
        gradients = [p.grad.clone() for p in blocks.parameters() if p.grad is not None]
        return [*gradients, hidden.detach()], torch.rand(3, device="cuda")

    plain, draw = run(0)
    for every in (1, 2):
        checkpointed_, next_draw = run(every)
        assert all(torch.equal(got, wanted) for got, wanted in zip(checkpointed_, plain, strict=True))
        assert torch.equal(next_draw, draw), "the stream goes on from where the forward left it"
