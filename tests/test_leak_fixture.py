"""The no-leak fixture fails a test for each kind of thing left behind, and for nothing else."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent

LEAKING = """
import _thread, multiprocessing, os, shutil, socket, subprocess, sys, threading, time
from pathlib import Path
import pytest

kept = []
SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]

def nap(): time.sleep(600)
def parent(): multiprocessing.get_context("fork").Process(target=nap).start()
def make_segment(): Path(f"{os.environ['MILLPOND_SHM']}/millpond-{os.getpid()}-leaktest").mkdir()

def started(method, target):
    process = multiprocessing.get_context(method).Process(target=target)
    process.start()
    return process

def test_thread():
    threading.Thread(target=nap, daemon=True, name="the-thread").start()

def test_thread_unknown_to_threading():
    running = threading.Event()
    _thread.start_new_thread(lambda: (running.set(), nap()), ())
    running.wait()

def test_subprocess():
    kept.append(subprocess.Popen(SLEEP))

@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_process(method):
    kept.append(started(method, nap))

def test_grandchild_of_a_living_child():
    kept.append(started("fork", parent))

def test_orphaned_grandchild():
    subprocess.run(["sh", "-c", "sleep 600 & exit 0"], stdout=subprocess.DEVNULL, check=True)

def test_orphaned_grandchild_in_its_own_session():
    subprocess.run(["setsid", "sh", "-c", "sleep 600 & exit 0"], stdout=subprocess.DEVNULL, check=True)

def test_file():
    kept.append(os.open(__file__, os.O_RDONLY))

def test_pipe():
    kept.extend(os.pipe())

def test_socket():
    kept.append(socket.socket())

def test_segment():
    make_segment()

def test_segment_of_a_dead_child():
    child = started("fork", make_segment)
    child.join()
    child.close()

@pytest.mark.leaks
def test_marker_without_a_reason():
    pass
"""

CLEAN = """
import gc, multiprocessing, os, shutil, socket, subprocess, sys, threading, time
from pathlib import Path
import pytest

def nothing(): pass
def short(): time.sleep(0.3)

class Cycle:
    def __init__(self):
        self.me, self.pipe = self, os.pipe()
    def __del__(self):
        for descriptor in self.pipe: os.close(descriptor)

def test_nothing():
    pass

def test_thread_that_ends_within_the_grace():
    threading.Thread(target=short).start()

@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_process_that_ended_while_its_helpers_stay(method):
    process = multiprocessing.get_context(method).Process(target=nothing)
    process.start()
    process.join()
    process.close()

def test_orphan_that_ends_within_the_grace():
    subprocess.run(["sh", "-c", "sleep 0.3 & exit 0"], stdout=subprocess.DEVNULL, check=True)

def test_zombie():
    child = os.posix_spawn("/bin/true", ["true"], {})
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)

def test_descriptors_that_the_garbage_collector_closes():
    Cycle()

def test_segment_that_is_removed():
    path = Path(f"{os.environ['MILLPOND_SHM']}/millpond-{os.getpid()}-leaktest")
    path.mkdir()
    path.rmdir()

def test_segment_of_another_living_process():
    Path(f"{os.environ['MILLPOND_SHM']}/millpond-{os.getppid()}-leaktest-foreign").mkdir()

@pytest.fixture(scope="module")
def shared_thread():
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    yield thread
    stop.set()
    thread.join()

def test_a_fixture_of_wider_scope_is_not_the_tests_leak(shared_thread):
    assert shared_thread.is_alive()

@pytest.mark.leaks(reason="shown to be let through")
def test_marker_with_a_reason():
    global kept
    kept = os.pipe()
"""


LEFT_BEHIND = {
    "test_thread": "thread .*the-thread",
    "test_thread_unknown_to_threading": "thread .*started without `threading`",
    "test_subprocess": "process .*sleep",
    "test_process[fork]": "process ",
    "test_process[spawn]": "process .*spawn_main",
    "test_process[forkserver]": "process .*forkserver",
    "test_grandchild_of_a_living_child": "(?s:process .*process )",
    "test_orphaned_grandchild": "process .*sleep 600",
    "test_orphaned_grandchild_in_its_own_session": "process .*sleep 600",
    "test_file": "descriptor .*test_each_kind.*\\.py",
    "test_pipe": "(?s:descriptor .*pipe.*descriptor .*pipe)",
    "test_socket": "descriptor .*socket",
    "test_segment": "segment .*leaktest, its owner lives",
    "test_segment_of_a_dead_child": "segment .*leaktest, its owner is dead",
}


@pytest.fixture
def run(pytester: pytest.Pytester) -> Callable[..., pytest.RunResult]:
    """Run test code in a pytest process of its own under this project's conftest."""
    for name in ("conftest.py", "leaks.py"):
        shutil.copy(HERE / name, pytester.path / name)

    def go(code: str, grace: float = 2.0) -> pytest.RunResult:
        pytester.makepyfile(code)
        options = ("-o", f"leak_grace={grace}", "-o", "markers=leaks")
        return pytester.runpytest_subprocess("-p", "no:cacheprovider", *options, timeout=100)

    return go


def test_each_kind_of_leak_fails_the_test_that_left_it(run):
    """The leaked processes sleep for 600 s: that the session ends before also shows that it kills them."""
    result = run(LEAKING, grace=0.1)
    result.assert_outcomes(passed=len(LEFT_BEHIND), errors=len(LEFT_BEHIND) + 1)
    _, *sections = re.split(r"^_+ ERROR at (?:teardown|setup) of (\S+) _+$", result.stdout.str(), flags=re.MULTILINE)
    messages = dict(zip(sections[::2], sections[1::2], strict=True))
    assert "needs reason" in messages.pop("test_marker_without_a_reason")
    assert messages.keys() == LEFT_BEHIND.keys()
    for name, pattern in LEFT_BEHIND.items():
        assert re.search("the test left behind:\n(?s:.*)" + pattern, messages[name]), messages[name]


def test_what_is_cleaned_up_in_time_is_no_leak(run):
    run(CLEAN).assert_outcomes(passed=12)


def test_a_failing_test_is_reported_for_its_own_fault_alone(run):
    result = run("import os\n\ndef test_fails():\n    pipe = os.pipe()\n    assert not pipe\n")
    result.assert_outcomes(failed=1)
