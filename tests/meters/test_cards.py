from __future__ import annotations

import pynvml
import pytest

from tui3090.meters.cards import cards, choose, find, visible
from tui3090.meters.nvml import CardMissing, Holder, by_user, gib
from tui3090.meters.watched import WatchedCard

GIB = 1 << 30


def uuids(seen):
    return [card.uuid for card in seen]


class TestCards:
    def test_all_cards_with_their_memory_and_holders(self, fake_nvml):
        fake_nvml.cards[1].processes = [(1001, GIB), (5000, 2 * GIB)]
        display, big = cards()
        assert (big.index, big.uuid, big.name, big.total) == (1, "GPU-bbbb", "NVIDIA GeForce RTX 3090", 24 * GIB)
        assert big.free == 24 * GIB - GIB - (400 << 20)
        assert big.holders == (Holder(5000, "someone", 2 * GIB), Holder(1001, "user1", GIB))
        assert display.holders == ()
        assert fake_nvml.open == 0

    def test_figures_the_driver_does_not_give_are_unknown(self, fake_nvml):
        fake_nvml.unsupported = {"nvmlDeviceGetMemoryInfo", "nvmlDeviceGetComputeRunningProcesses"}
        assert [(card.total, card.free) for card in cards()] == [(None, None)] * 2

    @pytest.mark.parametrize("code", [pynvml.NVML_ERROR_NO_PERMISSION, pynvml.NVML_ERROR_GPU_IS_LOST])
    def test_a_card_that_can_not_be_opened_is_left_out(self, fake_nvml, monkeypatch, code):
        def handle(index):
            if index == 0:
                raise pynvml.NVMLError(code)
            return fake_nvml.cards[index]

        monkeypatch.setattr(fake_nvml, "_nvmlDeviceGetHandleByIndex", handle, raising=False)
        assert [(card.index, card.uuid) for card in cards()] == [(1, "GPU-bbbb")]


class TestVisible:
    @pytest.mark.parametrize(
        ("chosen", "expected"),
        [
            (None, ["GPU-aaaa", "GPU-bbbb"]),
            ("1", ["GPU-bbbb"]),
            ("1,0", ["GPU-bbbb", "GPU-aaaa"]),
            (" 1 , 0 ", ["GPU-bbbb", "GPU-aaaa"]),
            ("GPU-bb", ["GPU-bbbb"]),
            ("GPU-bbbb,GPU-a", ["GPU-bbbb", "GPU-aaaa"]),
            ("1,7,0", ["GPU-bbbb"]),
            ("1,-1,0", ["GPU-bbbb"]),
        ],
    )
    def test_cuda_visible_devices(self, fake_nvml, monkeypatch, chosen, expected):
        monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        if chosen is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
        seen, ordered = visible(cards())
        assert uuids(seen) == expected
        assert ordered

    @pytest.mark.parametrize("chosen", ["", "-1", "0,0", "GPU-", "GPU-cccc", "none"])
    def test_a_value_that_hides_every_card(self, fake_nvml, monkeypatch, chosen):
        monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
        with pytest.raises(CardMissing, match=r"CUDA_VISIBLE_DEVICES='.*' hides every card"):
            visible(cards())

    def test_numbers_of_unlike_cards_are_not_guessed(self, fake_nvml, monkeypatch):
        """CUDA counts the fastest first: 0 may well be NVML's 1."""
        assert visible(cards()) == (cards(), False)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
        with pytest.raises(CardMissing, match="will be known once torch has loaded"):
            visible(cards())
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
        assert visible(cards()) == (cards(), False)

    def test_cards_of_one_kind_stand_in_nvml_s_order(self, fake_nvml, monkeypatch):
        fake_nvml.cards[0].name = fake_nvml.cards[1].name
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
        seen, ordered = visible(cards())
        assert (uuids(seen), ordered) == (["GPU-bbbb"], True)

    def test_a_mig_instance(self, fake_nvml, monkeypatch):
        fake_nvml.mig = [type(fake_nvml.cards[0])("MIG-1234", "NVIDIA A100 MIG 1g.5gb", 5 * GIB)]
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1234")
        seen, _ = visible(cards())
        assert [(card.uuid, card.total) for card in seen] == [("MIG-1234", 5 * GIB)]
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-9999")
        with pytest.raises(CardMissing):
            visible(cards())
        assert fake_nvml.open == 0


class TestChoose:
    def test_the_card_with_most_free_memory(self, fake_nvml):
        card, sentence = choose()
        assert card is not None
        assert (card.uuid, sentence) == ("GPU-bbbb", "")

    def test_says_who_holds_the_card_it_passes_over(self, fake_nvml):
        kind = type(fake_nvml.cards[0])
        fake_nvml.cards = [
            kind("GPU-0", used=21 * GIB, processes=[(1001, 21 * GIB)]),
            kind("GPU-1", used=2 * GIB, processes=[(1002, GIB), (1003, GIB)]),
            kind("GPU-2"),
        ]
        card, sentence = choose()
        assert card is not None
        assert card.uuid == "GPU-2"
        assert sentence == "cuda:0: 21 GiB held by user1, cuda:1: 2.0 GiB held by user2 and user3; taking cuda:2"

    def test_without_cuda_s_order_cards_are_told_apart_by_name(self, fake_nvml):
        fake_nvml.cards[0].processes = [(1001, GIB)]
        _, sentence = choose()
        assert sentence == (
            "NVIDIA GeForce GT 1030 (GPU-aaaa): 1.0 GiB held by user1; taking NVIDIA GeForce RTX 3090 (GPU-bbbb)"
        )

    def test_a_few_mib_of_a_desktop_are_not_worth_a_sentence(self, fake_nvml):
        fake_nvml.cards[0].processes = [(1001, 300 << 20)]
        assert choose()[1] == ""

    def test_without_a_driver_there_is_a_reason(self, fake_nvml):
        fake_nvml.init_error = pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
        assert choose() == (None, "No NVIDIA driver here: libnvidia-ml was not found.")

    def test_without_a_card_there_is_a_reason(self, fake_nvml):
        fake_nvml.cards = []
        assert choose() == (None, "There is no NVIDIA card here.")


class TestFind:
    def test_by_number(self, fake_nvml, monkeypatch):
        monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        assert [find("cuda:0"), find("cuda:1"), find("cuda")] == ["GPU-aaaa", "GPU-bbbb", "GPU-aaaa"]
        with pytest.raises(CardMissing, match="There is no cuda:2: CUDA sees 2 cards"):
            find("cuda:2")

    def test_the_chosen_one_without_a_number(self, fake_nvml):
        assert find("") == "GPU-bbbb"

    def test_a_number_that_only_cuda_can_resolve(self, fake_nvml):
        with pytest.raises(CardMissing, match="Which card cuda:1 is will be known once torch has loaded"):
            find("cuda:1")

    @pytest.mark.parametrize("chosen", [None, "1", "GPU-bb", "GPU-bbbb", "1,0"])
    @pytest.mark.parametrize("uuid", ["bbbb", "GPU-bbbb"])
    def test_the_card_torch_names_is_watched_whatever_the_variable_says(self, fake_nvml, monkeypatch, chosen, uuid):
        if chosen is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
        card = WatchedCard()
        card.follow(lambda: uuid)
        assert card.read(on_card=False)["card_total"] == 24 * GIB
        card.close()
        assert fake_nvml.open == 0


def test_memory_of_several_processes_is_told_by_user():
    holders = (Holder(1, "ann", GIB), Holder(2, "bob", 3 * GIB), Holder(3, "ann", GIB), Holder(4, "someone", None))
    assert by_user(holders) == "bob 3.0 GiB, ann 2.0 GiB, someone"
    assert [gib(b) for b in (0, GIB, int(9.94 * GIB), int(9.96 * GIB), 21 * GIB)] == [
        "0.0 GiB",
        "1.0 GiB",
        "9.9 GiB",
        "10 GiB",
        "21 GiB",
    ]
