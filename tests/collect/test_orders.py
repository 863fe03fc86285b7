"""What becomes of an actor's orders, whatever becomes of the actor. No Ray, no time that passes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from millpond.collect import FrameBudget
from millpond.collect.actor import Order, Outcome, Report
from millpond.collect.orders import OrderBook
from millpond.collect.worker import WorkerSpec
from millpond.core.errors import InvalidArgument

LINE = 2


class Sea:
    """An order book, its budget, and the receipt that the replay holds."""

    def __init__(self, duty: Any = "write", *, total: int = 100) -> None:
        self.budget = FrameBudget(total)
        self.receipt: int | None = 0
        sizes: dict[str, Any] = {"workers": 1, "num_envs": 2, "frames_per_batch": 10, "layout": "transitions"}
        none: dict[str, Any] = dict.fromkeys(("env", "policy", "weights", "replay", "seed"))
        spec = WorkerSpec(
            duty=duty, budget=self.budget, random_frames=15, keep_float64=False, worker=0, **sizes, **none
        )
        self.order_book = OrderBook(0, spec, line=LINE, budget=self.budget, receipt=lambda line: self.receipt)
        self.first = self.order_book.begin()

    def orders(self, n: int) -> list[Order]:
        found = [self.order_book.next_order(time=None) for _ in range(n)]
        assert None not in found
        return found  # type: ignore[return-value]

    def answer(self, outcome: Outcome, *, again: bool = True) -> None:
        self.order_book.answered(Report(outcome=outcome, line=(0, b"")), again=again)

    @property
    def account(self) -> tuple[int, int]:
        """Frames collected, and reserved."""
        return self.budget.collected, self.budget.reserved


@pytest.fixture
def sea() -> Iterator[Sea]:
    made = Sea()
    yield made
    made.budget.close()


def test_orders_are_reserved_when_they_are_given_and_shrink_at_the_end(sea: Sea) -> None:
    """Case unit-1."""
    orders = sea.orders(10)
    assert [order.number for order in orders] == list(range(1, 11))
    assert [order.first for order in orders][:3] == [0, 10, 20]
    assert sea.order_book.next_order(time=None) is None
    assert sea.account == (0, 100)
    sea.answer("written")
    sea.answer("dropped")
    assert (sea.account, sea.order_book.busy) == ((10, 80), 8)
    assert sea.order_book.next_order(time=3) == Order(number=11, frames=9, first=90)  # whole sequences


@pytest.mark.parametrize("written", [0, 1, 2])
def test_receipts_tell_what_a_dead_actor_wrote(sea: Sea, written: int) -> None:
    sea.orders(2)
    sea.receipt = written
    sea.order_book.died(doubt_ends=0.0)
    sea.order_book.settle(1.0)
    assert sea.account == (10 * written, 0)
    assert not sea.order_book.in_doubt
    assert sea.order_book.begin() == 3  # the numbers of the dead are not used again


def test_what_is_in_doubt_stays_reserved_until_it_appears_or_the_doubt_ends(sea: Sea) -> None:
    sea.orders(3)
    sea.answer("written")
    sea.receipt = 1
    sea.order_book.died(doubt_ends=5.0)
    sea.order_book.settle(1.0)
    assert (sea.account, sea.order_book.in_doubt) == ((10, 20), True)
    sea.receipt = 2  # it was still on its way
    sea.order_book.settle(2.0)
    assert (sea.account, sea.order_book.in_doubt) == ((20, 10), True)
    sea.receipt = None  # the owner does not answer just now
    sea.order_book.settle(4.0)
    assert sea.order_book.in_doubt
    sea.receipt = 2
    sea.order_book.settle(5.0)
    assert (sea.account, sea.order_book.in_doubt) == ((20, 0), False)


def test_what_a_pause_cut_off_comes_first_afterwards_and_is_not_in_doubt(sea: Sea) -> None:
    first, second = sea.orders(2)
    sea.answer("kept")
    sea.answer("kept")
    assert sea.account == (0, 20)
    assert sea.orders(2) == [first, second]
    sea.answer("kept")
    sea.receipt = 0
    sea.order_book.died(doubt_ends=9.0)
    assert sea.account == (0, 10)  # the one that was under way
    sea.order_book.settle(9.0)
    assert sea.account == (0, 0)


def test_what_is_kept_at_the_end_goes_back(sea: Sea) -> None:
    sea.orders(2)
    sea.answer("kept", again=False)
    assert sea.account == (0, 10)
    sea.order_book.give_back()
    assert sea.account == (0, 0)


@pytest.mark.parametrize("receipt", [0, 9])
def test_somebody_else_on_this_line_is_noticed(sea: Sea, receipt: int) -> None:
    sea.orders(2)
    sea.answer("written")
    sea.receipt = receipt
    sea.order_book.died(doubt_ends=0.0)
    with pytest.raises(InvalidArgument, match="line 2"):
        sea.order_book.settle(1.0)


def test_batches_that_were_handed_over_stay_reserved_when_their_actor_dies() -> None:
    sea = Sea("hand_over")
    sea.orders(2)
    sea.answer("batch")
    sea.order_book.died(doubt_ends=9.0)
    assert (sea.account, sea.order_book.handed, sea.order_book.in_doubt) == ((0, 10), 1, False)
    sea.budget.close()


def test_in_rounds_the_successor_gets_the_same_orders() -> None:
    sea = Sea("obey")
    assert sea.order_book.next_order(time=None) is None  # only when told
    for number, frames in enumerate((10, 7, 5), start=1):
        sea.order_book.want(frames, 0, number=number)
        sea.order_book.want(frames, 0, number=number)  # twice is once
    sea.orders(2)
    sea.answer("kept")
    sea.order_book.died(doubt_ends=0.0)
    sea.order_book.settle(1.0)
    assert sea.order_book.begin() == 3
    assert [order.frames for order in sea.orders(3)] == [10, 7, 5]
    assert sea.account == (0, 0)  # the collector reserves and counts
    sea.budget.close()
