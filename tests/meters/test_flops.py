from __future__ import annotations

import threading
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own abbreviation
from torch import nn
from torch.utils.checkpoint import checkpoint

from tui3090.meters.flops import FlopCount, FlopCounter, recompute_context

BATCH, CONTEXT, WIDTH, HEADS, LAYERS, VOCABULARY = 2, 32, 64, 4, 3, 128


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        heads = (t.view(BATCH, CONTEXT, HEADS, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(BATCH, CONTEXT, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, checkpointing: bool) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, rows):
        x = self.embed(rows)
        for block in self.blocks:
            x = checkpointed(block, x) if self.checkpointing else block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), rows.flatten())


def checkpointed(block, x):
    return checkpoint(block, x, use_reentrant=False, context_fn=lambda: (nullcontext(), recompute_context()))


def matmul_parameters(model) -> int:
    return sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))


def counted(model) -> FlopCount:
    counter = FlopCounter()
    with counter:
        model(torch.randint(0, VOCABULARY, (BATCH, CONTEXT))).backward()
    assert counter.count is not None
    return counter.count


TOKENS = BATCH * CONTEXT
ATTENTION = 12 * LAYERS * WIDTH * CONTEXT * TOKENS
"""Forward and backward, 12 * layers * (heads * head size) * context for each token."""


class TestClosedForm:
    """6 N tokens + 12 L H Q T tokens (PaLM, appendix B)."""

    @pytest.mark.parametrize("checkpointing", [False, True])
    def test_model_flops(self, checkpointing):
        model = GPT(checkpointing)
        closed = 6 * matmul_parameters(model) * TOKENS + ATTENTION
        assert counted(model).model == pytest.approx(closed, rel=1e-9)

    def test_hardware_flops_have_what_checkpointing_repeats(self):
        model = GPT(checkpointing=True)
        plain = counted(GPT(checkpointing=False)).hardware
        # A block's last matrix product is not repeated: the recomputation stops when it has all that backward needs.
        repeated = 2 * TOKENS * (matmul_parameters(model.blocks) - LAYERS * 4 * WIDTH * WIDTH) + ATTENTION / 3
        assert counted(model).hardware == pytest.approx(plain + repeated, rel=1e-9)

    def test_fused_attention_computes_its_scores_twice(self):
        count = counted(GPT(checkpointing=False))
        assert count.hardware - count.model == ATTENTION / 6

    def test_fewer_key_heads_than_query_heads(self):
        query = torch.randn(1, 8, 16, 4, requires_grad=True)
        key = torch.randn(1, 2, 16, 4)
        counter = FlopCounter()
        with counter:
            F.scaled_dot_product_attention(query, key, key, enable_gqa=True)
        assert counter.count is not None
        assert counter.count.model == 2 * 2 * 8 * 16 * 16 * 4

    def test_a_convolution(self):
        convolution = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        counter = FlopCounter()
        with counter:
            convolution(torch.randn(2, 3, 10, 10))
        assert counter.count == FlopCount(model=2 * 2 * 100 * 8 * 27, hardware=2 * 2 * 100 * 8 * 27)


class TestCounting:
    def test_nothing_counted_is_unknown(self):
        counter = FlopCounter()
        with counter:
            torch.ones(3).add(1)
        assert counter.count is None

    def test_a_shape_that_torch_s_formula_refuses_leaves_the_step_alone(self, monkeypatch):
        def refuse(*_args, **_kwargs):
            raise AssertionError("shapes")

        monkeypatch.setitem(torch.utils.flop_counter.flop_registry, torch.ops.aten.mm, refuse)
        counter = FlopCounter()
        with counter:
            product = torch.ones(2, 3) @ torch.ones(3, 2)
            torch.bmm(torch.ones(1, 2, 2), torch.ones(1, 2, 2))
        assert product.tolist() == [[3, 3], [3, 3]]
        assert counter.count is None

    def test_results_are_those_of_an_uncounted_run(self):
        model, rows = GPT(checkpointing=True), torch.randint(0, VOCABULARY, (BATCH, CONTEXT))
        plain = model(rows)
        plain.backward()
        gradients = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        with FlopCounter():
            loss = model(rows)
            loss.backward()
        assert torch.equal(loss, plain)
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients))

    @pytest.mark.parametrize("function", [F.silu, F.mish, F.gelu, lambda x: F.rms_norm(x, (x.shape[-1],))])
    def test_operators_run_in_one_piece(self, function):
        x = torch.randn(1000, generator=torch.Generator().manual_seed(0)).requires_grad_()

        def gradient():
            return torch.autograd.grad(function(x).pow(3).sum(), x)[0]

        plain = gradient()
        with FlopCounter():
            counted = gradient()
        assert torch.equal(counted, plain)

    def test_other_threads_are_neither_counted_nor_hooked(self):
        inside, done = threading.Event(), threading.Event()
        seen = []

        def other():
            inside.wait(30)
            linear = nn.Linear(50, 50)
            linear(torch.ones(1, 50)).sum().backward()
            seen.append(isinstance(recompute_context(), nullcontext))
            done.set()

        thread = threading.Thread(target=other)
        thread.start()
        counter = FlopCounter()
        with counter:
            inside.set()
            assert done.wait(30)
            torch.ones(2, 3) @ torch.ones(3, 4)
        thread.join()
        assert counter.count == FlopCount(48, 48)
        assert seen == [True]

    def test_an_exception_ends_the_counting(self):
        counter = FlopCounter()
        with pytest.raises(RuntimeError, match="boom"), counter:
            raise RuntimeError("boom")
        torch.ones(2, 3) @ torch.ones(3, 4)
        assert counter.count is None
        assert isinstance(recompute_context(), nullcontext)

    def test_a_recomputation_that_fails_does_not_hide_what_follows(self):
        counter = FlopCounter()
        with counter:
            with pytest.raises(RuntimeError), recompute_context():
                torch.ones(2, 3) @ torch.ones(3, 4) @ torch.ones(7, 7)
            torch.ones(2, 3) @ torch.ones(3, 4)
        assert counter.count == FlopCount(model=48, hardware=96)

    def test_without_a_counter_checkpointing_runs_as_ever(self):
        x = torch.ones(1, 4, requires_grad=True)
        checkpointed(nn.Linear(4, 4), x).sum().backward()
        assert x.grad is not None
