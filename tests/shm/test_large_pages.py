"""Large private memory asks for large pages, where the system has them."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from millpond.shm.mapped import HUGE, anonymous


def advised(address: int) -> bool:
    """Did somebody ask for large pages in the mapping that holds ``address``?"""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            low, high = (int(part, 16) for part in head.split("-"))
            inside = low <= address < high
        elif inside and head == "VmFlags:":
            return "hg" in line.split()
    return False


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists(), reason="this kernel has no large pages"
)
@pytest.mark.parametrize(("nbytes", "large"), [(HUGE, True), (HUGE // 2, False)])
def test_large_pages_are_asked_for_where_they_pay(nbytes: int, large: bool) -> None:
    with anonymous(nbytes) as memory:
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        memory[:] = bytes(1) * nbytes
        assert advised(address) is large
        assert memory[nbytes - 1] == 0
