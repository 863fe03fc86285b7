from __future__ import annotations

import os
import signal
import threading

import pytest

from millpond.train.supervise import Interrupted, StopSignal


def test_one_signal_asks_and_two_insist():
    """proc-7"""
    said: list[str] = []
    before = signal.getsignal(signal.SIGINT)
    with StopSignal(say=said.append) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested
        assert stop.signal == signal.SIGINT
        assert said == ["stopping: saving a checkpoint (once more: stop at once)"]
        with pytest.raises(Interrupted):
            os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_run_that_has_ended_is_not_interrupted_any_more():
    with StopSignal(say=lambda text: None) as stop:
        stop.shield()
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
    assert stop.signal == signal.SIGINT


def test_in_another_thread_there_is_no_signal_and_the_event_still_works():
    seen: list[bool] = []

    def run() -> None:
        with StopSignal() as stop:
            stop.request()
            seen.append(stop.requested)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [True]
