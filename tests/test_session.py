"""What conftest.py arranges for every test holds, here and in the processes that tests start."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
import torch


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)


def test_torch_uses_one_thread():
    assert torch.get_num_threads() == 1
    assert run("import torch; print(torch.get_num_threads())").stdout == "1\n"


def test_ctrl_c_interrupts_also_where_the_tests_run_in_the_background():
    with pytest.raises(KeyboardInterrupt):  # whichever handler: a buffer that an earlier test made has its own
        signal.raise_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in run("import os, signal; os.kill(os.getpid(), signal.SIGINT)").stderr
