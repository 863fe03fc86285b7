"""Strangers, and clients that say what they should not: nobody ends an owner, holds its memory, or stops the others."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import threading
import time
from typing import Any

import fuzzing
import psutil
import pytest
import remote_children as children
import torch
from fuzzing import SCHEMA, Fuzzer, frame, say
from remote_children import batch, ids_of, wait_for

from millpond import BlockingReplayBuffer, ReplayBuffer
from millpond.core.errors import InvalidArgument, InvalidType, MillpondError, OutOfMemory
from millpond.remote import caller
from millpond.remote import handlers as answering
from millpond.remote import listener as listener
from millpond.remote.allowance import STEP, Allowance
from millpond.remote.client import ReplayClient
from millpond.remote.messages import HEAD, SMALL, Message, decode, encode
from millpond.replay import ConsumingSampler, PrioritizedSampler, SamplerWithoutReplacement

INPUTS = int(os.environ.get("MILLPOND_FUZZ", "1500"))
MIB = 1 << 20


def dial(owner: Any, identity: bytes | None = None) -> socket.socket:
    connection = socket.create_connection(owner.line, timeout=20)
    connection.sendall(owner.token + (os.urandom(16) if identity is None else identity))
    return connection


def hung_up(connection: socket.socket) -> bool:
    """Has the owner? What it still says is read."""
    connection.setblocking(False)
    try:
        while connection.recv(1 << 20):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return True


def memory(pid: int) -> int:
    return int(psutil.Process(pid).memory_info().rss)


# ---------------------------------------------------------------------- anything
PONDS: dict[str, dict[str, Any]] = {
    "prioritized": {"sampler": PrioritizedSampler(), "batch_size": 4},
    "consuming": {"kind": BlockingReplayBuffer, "batch_size": 4},
    "epochs": {"sampler": SamplerWithoutReplacement(), "batch_size": 4, "prefetch": 2},
}


def limit_memory(state: dict[str, Any], more: int) -> None:
    """What is allocated beyond what is there now, touched or not, must stay within so many bytes."""
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + more, resource.RLIM_INFINITY))


@pytest.mark.timeout(120 + INPUTS // 50)
@pytest.mark.parametrize("sort", PONDS)
def test_no_input_harms_the_owner_or_its_other_clients(child, client, sort, tmp_path):
    """Every kind of request with every field spoiled, from somebody who knows the token and from somebody who does
    not. ``MILLPOND_FUZZ`` says how many connections; each is answered or hung up on in time."""
    owning = child()
    owner = owning.ask(children.open_service, children.plan(1000, schema=SCHEMA, **PONDS[sort]))
    owning.ask(limit_memory, 4 << 30)
    made = client(owner)
    made.extend(batch(20))
    made.dumps(tmp_path / "saved")
    fuzzer = Fuzzer(owner, INPUTS, (tmp_path / "saved").read_bytes())
    before, highest = memory(owning.pid), 0
    for i in range(INPUTS // len(PONDS)):
        say(owner, fuzzer.stream())
        if i % 25 == 0:
            made.stats()
            made.empty()
            made.extend(batch(8), timeout=20)
            assert len(ids_of(made.sample(4, wait=True, timeout=20))) == 4
            highest = max(highest, memory(owning.pid))
    assert highest - before < 400 * MIB
    wait_for(lambda: len(owning.ask(children.describe)["clients"]) == 1, "the owner to forget them")
    assert owning.process.is_alive()


def test_what_is_no_request_is_told_off_or_hung_up_on(pond, client):
    """A request that was meant for a native library: an address that is none. And kinds and fields of no kind."""
    owner = pond(10, schema=SCHEMA)
    made = client(owner)
    for fields in ({"address": "00" * 170, "direct": False}, {"address": "zz"}, {}):
        with pytest.raises(InvalidArgument, match="nobody here knows what 'group' is"):
            made._buffer._session.call("group", fields)
    with pytest.raises(InvalidArgument, match="do not lie on a GPU"):
        made._buffer._session.call("direct")
    for fields in ({"n": 3}, {"n": "3", "exempt": False}, {"n": True, "exempt": False}, {"n": 3, "exempt": 0}):
        with pytest.raises(InvalidArgument, match="can_sample"):
            made._buffer._session.call("can_sample", fields)
    asked = {"n": 1, "wait": False, "exempt": False, "schema": "", "who": 1, "receipt": None}
    with pytest.raises(InvalidArgument, match="rows"):
        made._buffer._session.call("extend", asked)
    assert made.write_count == 0


@pytest.mark.parametrize("n", [-1, 0, True, 1.5, "x", None, 10**10, 10**15, 2**62, 10**40])
@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_odd_numbers_get_the_errors_of_a_buffer_in_this_process(pond, client, transport, n):
    """In their kind and in their words, without a traceback of the owner's. How much is free may change between two."""
    here = ReplayBuffer(10, schema=SCHEMA)
    there = client(pond(10, schema=SCHEMA), transport=transport)
    for buffer in (here, there):
        buffer.extend(batch(10))
    for call in ("sample", "peek", "can_sample", "wait_until_sampleable", "wait_until_writable"):
        told = []
        for buffer in (here, there):
            options = {"timeout": 0} if call.startswith("wait") else {}
            try:
                told.append(str(getattr(buffer, call)(n, **options)))
            except MillpondError as error:
                told.append(f"{type(error).__name__}: {error} {error.__dict__}".partition(", and ")[0])
        assert told[0] == told[1], call
    here.close()


@pytest.mark.parametrize("timeout", [-1, float("nan"), True, "x", 1e308, float("inf"), 10**400])
def test_odd_timeouts_too(pond, client, timeout):
    owner = pond(10, schema=SCHEMA)
    there, here = client(owner), ReplayBuffer(10, schema=SCHEMA)
    told: list[list[str]] = []
    for buffer in (here, there):
        buffer.extend(batch(3))
        told.append([])
        for call in (
            lambda b: b.sample(2, wait=True, timeout=timeout),
            lambda b: b.wait_until_writable(timeout=timeout),
        ):
            try:
                told[-1].append(type(call(buffer)).__name__)
            except MillpondError as error:
                told[-1].append(f"{type(error).__name__}: {error}")
    assert told[0] == told[1]
    here.close()


def test_a_batch_beyond_what_is_free_is_refused_with_the_numbers():
    rb = ReplayBuffer(10, schema=SCHEMA)
    rb.extend(batch(10))
    for call in (rb.sample, rb.peek):
        for n in (10**10, 10**15, 2**62 - 1):
            with pytest.raises(OutOfMemory, match=f"a batch of {n} items takes"):
                call(n)
        with pytest.raises(InvalidArgument, match="less than 2"):
            call(2**62)
    rb.close()


def test_an_answer_has_a_largest_size(pond, client, monkeypatch):
    """However many bytes are free, one client cannot have them all."""
    made = client(pond(10, schema=SCHEMA))
    made.extend(batch(10))
    n = answering.ANSWER // SCHEMA.row_nbytes + 1
    for call in (made.sample, made.peek):
        with pytest.raises(OutOfMemory, match=f"{n} items are .* bytes"):
            call(n)


# ---------------------------------------------------------------------- memory
def test_what_is_announced_takes_no_memory_before_it_comes(pond, keeper, client):
    """40 clients announce 64 MiB each, as a head or as a payload, and send nothing."""
    owner = pond(10**6, schema=SCHEMA)
    made = client(owner)
    made.extend(batch(10))
    before = memory(keeper.pid)
    head, _ = encode(Message("extend", 1, {}, {"rows": torch.zeros(MIB, 64, dtype=torch.uint8)}))
    assert HEAD.unpack_from(head)[4] == 64 * MIB
    with contextlib.ExitStack() as stack:
        everybody = [stack.enter_context(dial(owner)) for _ in range(40)]
        for i, each in enumerate(everybody):
            each.sendall(frame(head) if i % 2 else (64 * MIB).to_bytes(4, "little"))
        wait_for(lambda: len(keeper.ask(children.describe, "pond0")["clients"]) == 41, "all of them")
        made.extend(batch(3000))
        assert memory(keeper.pid) - before < 20 * MIB
        assert not any(hung_up(each) for each in everybody)


def test_what_comes_takes_memory_within_one_allowance(office):
    """Of those who send at once, whoever came first goes on; the others wait for what it gives back."""
    head, payload = encode(Message("say", 1, {}, {"rows": torch.ones(6 * STEP, dtype=torch.uint8)}))
    whole = frame(head, payload.numpy().tobytes())
    connections = [dial_office(office) for _ in range(4)]
    sending = [threading.Thread(target=each.sendall, args=(whole[: 5 * STEP],)) for each in connections]
    for thread in sending:
        thread.start()
    wait_for(lambda: office.allowance.taken >= 8 * STEP, "the allowance to be taken")
    assert office.allowance.taken <= (8 + 6) * STEP  # what the first has beyond it is its own payload
    got: list[int] = []

    def finish(connection: socket.socket, first: threading.Thread) -> None:
        first.join()
        connection.sendall(whole[5 * STEP :])
        heard = 0
        while heard < 6 * STEP:
            heard += len(connection.recv(1 << 20)) or 1 << 60
        got.append(heard)

    finishing = [threading.Thread(target=finish, args=each) for each in zip(connections, sending, strict=True)]
    for thread in finishing:
        thread.start()
    for thread in finishing:
        thread.join(30)
    assert len(got) == 4, "all of them end, in whatever order"
    assert max(got) < 7 * STEP
    wait_for(lambda: office.allowance.taken == 0, "all of it to be given back")
    for each in connections:
        each.close()


def test_an_allowance_is_waited_for_until_the_deadline():
    allowance = Allowance(10)
    first, second = object(), object()
    assert allowance.take(first, 8, time.monotonic())
    assert not allowance.take(second, 8, time.monotonic() + 0.01)
    assert allowance.take(first, 100, time.monotonic()), "the first may always go on"
    allowance.give_back(first)
    assert allowance.take(second, 8, time.monotonic())
    allowance.give_back(second)
    assert allowance.taken == 0


def hold_little(state: dict[str, Any], nbytes: int) -> None:
    answering.HELD = nbytes


def test_writes_that_wait_are_held_within_a_budget(child, client):
    owning = child()
    owning.ask(hold_little, 300 * SCHEMA.row_nbytes)
    owner = owning.ask(children.open_service, children.plan(100, kind=BlockingReplayBuffer, schema=SCHEMA))
    made = client(owner)
    made.extend(batch(100))
    writing = [threading.Thread(target=made.extend, args=(batch(100),)) for _ in range(3)]
    for thread in writing:
        thread.start()
    wait_for(lambda: made.stats()["waiting_producers"] == 3, "the writers")
    with pytest.raises(OutOfMemory, match=f"writes of {300 * SCHEMA.row_nbytes} bytes wait at the owner"):
        made.extend(batch(100))
    for _ in range(3):
        made.sample(100, wait=True, timeout=20)  # the next of the writers comes in its own time
    for thread in writing:
        thread.join(20)
    made.sample(100, wait=True, timeout=20)
    made.extend(batch(100))  # what they held was given back
    assert made.write_count == 500


# ---------------------------------------------------------------------- time
class Office:
    """An owner's end that says back what it hears."""

    def __init__(self) -> None:
        self.here: list[Any] = []
        self.left: list[Any] = []
        self.token = os.urandom(16)
        self.allowance = Allowance(8 * STEP)
        self.board = listener.Listener(
            "127.0.0.1",
            token=self.token,
            allowance=self.allowance,
            came=self.here.append,
            serve=self.serve,
            left=self.left.append,
        )

    def serve(self, caller: Any, head: bytearray) -> None:
        asked = decode(head, caller.payload(head, 1 << 30))
        caller.answer(asked.number, *encode(Message(asked.kind, asked.number, {}, asked.tensors)))


@pytest.fixture
def office():
    made = Office()
    yield made
    made.board.close()


def dial_office(office: Office) -> socket.socket:
    connection = socket.create_connection(office.board.address, timeout=20)
    connection.sendall(office.token + os.urandom(16))
    return connection


def answered(office: Office) -> bool:
    """Does somebody who knows the token get an answer?"""
    with dial_office(office) as connection:
        connection.sendall(frame(encode(Message("say", 7))[0]))
        got = b""
        while len(got) < 30:
            part = connection.recv(1000)
            if not part:
                return False
            got += part
        return True


def test_strangers_have_one_deadline_to_say_who_they_are(office, monkeypatch):
    """200 of them, who know how every byte of the token goes on, and send one whenever they would be given up."""
    monkeypatch.setattr(listener, "HELLO_S", 0.5)
    strangers = [socket.create_connection(office.board.address, timeout=20) for _ in range(200)]
    for k in range(31):
        for each in strangers:
            with contextlib.suppress(OSError):
                each.send((office.token + bytes(16))[k : k + 1])
        if k == 3:
            assert answered(office)
        time.sleep(0.05)
    wait_for(lambda: all(hung_up(each) for each in strangers), "all to be hung up on", 5)
    assert len(office.here) == 1
    for each in strangers:
        each.close()


def test_strangers_take_no_thread_and_not_the_place_of_others(office):
    threads = threading.active_count()
    strangers = [socket.create_connection(office.board.address, timeout=20) for _ in range(3 * listener.STRANGERS)]
    assert answered(office)
    wait_for(lambda: sum(hung_up(each) for each in strangers) >= 2 * listener.STRANGERS, "the first to give way")
    assert threading.active_count() <= threads + 1
    for each in strangers:
        each.close()


def test_a_wrong_token_is_hung_up_on_at_its_first_wrong_byte(office):
    with socket.create_connection(office.board.address, timeout=20) as stranger:
        stranger.sendall(bytes([office.token[0] ^ 1]))
        wait_for(lambda: hung_up(stranger), "the owner to hang up", 5)


@pytest.mark.parametrize("part", ["length", "head", "payload", "answer"])
def test_a_request_and_an_answer_have_a_deadline(office, monkeypatch, part):
    monkeypatch.setattr(caller, "STALLED_S", 0.3)
    monkeypatch.setattr(caller, "SLOWEST", 1 << 40)
    head, payload = encode(Message("say", 1, {}, {"rows": torch.ones(60 * MIB, dtype=torch.uint8)}))
    whole = frame(head, payload.numpy().tobytes())
    with dial_office(office) as slow:
        wait_for(lambda: office.here, "it to be let in")
        end = {"length": 2, "head": 40, "payload": 2 * MIB, "answer": len(whole)}[part]
        with contextlib.suppress(ConnectionError):
            slow.sendall(whole[:end])
        wait_for(lambda: office.left, "the owner to hang up", 10)
    assert answered(office)


def test_a_client_s_number_belongs_to_who_came_first(pond, client):
    """Somebody who heard its hello, and says it again, is sent away; the client does not notice."""
    owner = pond(10, schema=SCHEMA)
    made = client(owner)
    made.extend(batch(3))
    for _ in range(3):
        with dial(owner, made._buffer._session._line.id) as again:
            wait_for(lambda: hung_up(again), "the second to be sent away", 5)
        assert made.write_count == 3
    assert not made._buffer.lost


def test_a_batch_goes_back_only_to_where_it_came_from(pond, client):
    """What was handed out is what the owner knows of it: nobody gives back what it was never given."""
    owner = pond(10, schema=SCHEMA, sampler=ConsumingSampler(1), batch_size=4)
    one, two = client(owner), client(owner)
    one.extend(batch(10))
    one.sample()
    for session in (one._buffer._session, two._buffer._session):
        for number in (0, 1, 2, 3, 10**6):
            with pytest.raises(InvalidArgument, match="no batch that could come back"):
                session.call("give_back", {"number": number})
    stats = one.stats()
    assert (stats["samples_returned"], stats["size"]) == (4, 6)


# ---------------------------------------------------------------------- what runs out
def take_descriptors(state: dict[str, Any], leave: int) -> None:
    """Leave so few descriptors."""
    now = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (now + leave, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def processor_time(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def test_an_owner_without_descriptors_refuses_and_goes_on(child, client):
    """It does not spin either; and when some are free again, who comes is let in."""
    owning = child()
    owner = owning.ask(children.open_service, children.plan(10, schema=SCHEMA))
    made = client(owner)
    made.extend(batch(3))
    owning.ask(take_descriptors, 6)
    strangers = [socket.create_connection(owner.line, timeout=20) for _ in range(60)]
    begun = processor_time(owning.pid)
    wait_for(lambda: sum(hung_up(each) for each in strangers) >= 40, "most to be hung up on")
    time.sleep(1)
    assert processor_time(owning.pid) - begun < 0.7
    assert made.write_count == 3
    for each in strangers:
        each.close()

    def let_in() -> bool:
        try:
            with ReplayClient(owner, transport="gloo", connect_timeout=20) as late:
                return late.write_count == 3
        except ConnectionError:
            return False

    wait_for(let_in, "somebody to be let in")


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.ECONNABORTED])
def test_the_acceptor_outlives_every_error_of_the_system_s(office, monkeypatch, number):
    failing = [5]
    accept = socket.socket.accept

    def fails(listener: socket.socket) -> Any:
        if failing[0]:
            failing[0] -= 1
            raise OSError(number, os.strerror(number))
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", fails)
    wait_for(lambda: answered_in_the_end(office), "an answer")
    assert failing == [0]


def answered_in_the_end(office: Office) -> bool:
    try:
        return answered(office)
    except ConnectionError:
        return False


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError(), OSError(errno.EAGAIN, "no")])
def test_the_acceptor_outlives_a_thread_that_cannot_be_made(office, monkeypatch, error):
    start = threading.Thread.start

    def fails(thread: threading.Thread) -> None:
        if thread.name == "millpond-caller":
            raise error
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fails)
        for _ in range(3):
            assert not answered_in_the_end(office)
    assert answered(office)
    assert len(office.here) == 1


def test_who_hangs_up_leaves_nothing(pond, keeper, client):
    """With a hello, without one, and in the middle of a request."""
    owner = pond(10, schema=SCHEMA)
    client(owner).extend(batch(3))
    threads, descriptors = keeper.ask(children.possessions)
    for i in range(600):
        with socket.create_connection(owner.line, timeout=20) as each:
            if i % 3:
                each.sendall(owner.token + os.urandom(16))
            if i % 3 == 2:
                each.sendall(frame(b"MPRM" * 20)[:50])

    def given_back() -> bool:
        now = keeper.ask(children.possessions)
        return now[0] <= threads and now[1] <= descriptors

    wait_for(given_back, "everything to be given back")


def listeners(pid: int) -> list[Any]:
    return [each for each in psutil.Process(pid).net_connections("inet") if each.status == psutil.CONN_LISTEN]


def open_deaf(state: dict[str, Any], asked: Any) -> None:
    state["service"] = children.Server(asked, node=children.HERE, cluster="")


def begin_to_listen(state: dict[str, Any]) -> Any:
    return state["service"].listen()


def shut(state: dict[str, Any]) -> None:
    state.pop("service").close()


def test_nothing_listens_before_somebody_needs_it(child, client):
    """And then one port does, for all: heads, payloads, whoever comes. Clients in shared memory need none."""
    owning = child()
    owning.ask(open_deaf, children.plan(10, schema=SCHEMA))
    assert listeners(owning.pid) == []
    owner = owning.ask(begin_to_listen)
    near, far = client(owner, transport="shm"), client(owner)
    far.extend(batch(3))
    assert len(near) == len(far) == 3
    assert [each.laddr.port for each in listeners(owning.pid)] == [owner.line[1]]
    assert owning.ask(begin_to_listen).line == owner.line
    owning.ask(shut)
    assert listeners(owning.pid) == []


# ---------------------------------------------------------------------- messages
@pytest.mark.parametrize(
    ("place", "value"),
    [
        *((0, 3), (0, None), (1, "load"), (1, "Tensor"), (1, ["uint8"]), (1, "qint8"), (2, [-1]), (2, [2**70])),
        *((2, [1.0]), (2, [True]), (2, "11"), (2, [1] * 65), (2, [0, 2**61, 2**61]), (2, [10**9])),
    ],
)
def test_a_head_that_lies_about_its_tensors_is_refused(place, value):
    import json

    head, _ = encode(Message("ask", 1, {}, {"a": torch.zeros(8, dtype=torch.uint8)}))
    *start, length = HEAD.unpack_from(head)
    said = json.loads(head[HEAD.size : HEAD.size + length])
    said["tensors"][0][place] = value
    text = json.dumps(said).encode()
    with pytest.raises(InvalidArgument, match="cannot be read"):
        decode(HEAD.pack(*start, len(text)) + text + bytes(200), None)


def test_a_bool_is_0_or_1():
    for n in (3, SMALL + 1):
        head, payload = encode(Message("ask", 1, {}, {"a": torch.ones(n, dtype=torch.bool)}))
        damaged = bytearray(head)
        if payload is None:
            damaged[-1] = 2
        else:
            payload = payload.clone()
            payload.view(torch.uint8)[-1] = 2
        with pytest.raises(InvalidArgument, match="a bool is 0 or 1"):
            decode(damaged, payload)


def test_the_fuzzer_makes_what_it_says(pond):
    """The proper requests of it are proper, so what it spoils is what is told off."""
    owner = pond(1000, schema=SCHEMA, sampler=PrioritizedSampler())
    fuzzer = Fuzzer(owner, 1, bytes(100))
    from millpond.remote import requests

    for kind in fuzzing.KINDS:
        if kind in requests.FIELDS:
            requests.check(fuzzer.proper(kind))
        else:
            with pytest.raises((InvalidArgument, InvalidType)):
                requests.check(fuzzer.proper(kind))
