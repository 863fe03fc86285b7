"""The parts of remote replay on their own: messages, the ledger, pending calls, lines. Nothing here sleeps."""

from __future__ import annotations

import queue
import secrets
import socket
import threading
from typing import Any

import pytest
import torch
from remote_children import wait_for

from millpond.core import errors
from millpond.core.errors import InvalidArgument, MillpondError, PeerLost, SchemaMismatch, WorkerFailed
from millpond.remote.allowance import STEP, Allowance
from millpond.remote.connection import COLLECT, Connection
from millpond.remote.listener import Listener
from millpond.remote.messages import SMALL, Message, decode, encode, failed, number_of, payload_nbytes, raised
from millpond.remote.packed import PIECE, Spool, places
from millpond.remote.pending import Call, Ledger, PendingCalls

# ---------------------------------------------------------------------- messages
SIZES = {"empty": 0, "small": 100, "brim": SMALL, "large": SMALL + 1}


@pytest.mark.parametrize("first", SIZES)
@pytest.mark.parametrize("second", SIZES)
def test_a_message_arrives_as_it_was_sent(first, second):
    tensors = {
        "a": torch.arange(SIZES[first]).to(torch.uint8),
        "b": torch.arange(SIZES[second]).to(torch.int16).to(torch.bfloat16),
        "c": torch.tensor(3.5),
        "d": torch.arange(12).view(3, 4).t(),
    }
    head, payload = encode(Message("ask", 7, {"n": 3, "key": ["a", None]}, tensors, settled=5))
    assert payload_nbytes(head) == (0 if payload is None else payload.numel())
    assert number_of(head) == 7
    got = decode(head, None if payload is None else payload.clone())
    assert (got.kind, got.number, got.fields, got.settled) == ("ask", 7, {"n": 3, "key": ["a", None]}, 5)
    assert got.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert got.tensors[name].dtype == tensor.dtype
        assert torch.equal(got.tensors[name], tensor)
        got.tensors[name].zero_()  # it is the receiver's


def test_a_payload_may_be_on_its_way_while_the_head_is_read():
    head, payload = encode(Message("ask", tensors={"a": torch.ones(SMALL + 8), "b": torch.zeros(SMALL + 8)}))
    asked = []
    got = decode(head, lambda: asked.append(1) or payload)
    assert asked == [1]
    assert torch.equal(got.tensors["a"], torch.ones(SMALL + 8))


def test_one_large_tensor_is_sent_from_where_it_lies():
    rows = torch.zeros(1000, 112, dtype=torch.uint8)
    _, payload = encode(Message("extend", tensors={"rows": rows, "priority": torch.ones(1000)}))
    assert payload is not None
    assert payload.data_ptr() == rows.data_ptr()


@pytest.mark.parametrize("spoil", ["short", "magic", "version", "json", "field", "payload"])
def test_what_is_no_message_is_refused(spoil):
    head, payload = encode(Message("ask", tensors={"a": torch.zeros(SMALL + 8, dtype=torch.uint8)}))
    damaged = bytearray(head)
    if spoil == "short":
        damaged = damaged[:10]
    elif spoil == "magic":
        damaged[0] ^= 1
    elif spoil == "version":
        damaged[4] ^= 2
    elif spoil == "json":
        damaged[-1] ^= 255
    elif spoil == "field":
        damaged = bytearray(bytes(damaged).replace(b"uint8", b"uintX"))
    else:
        payload = None
    with pytest.raises(InvalidArgument):
        decode(damaged, payload)


def test_errors_keep_their_names_and_words():
    tree = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, MillpondError)]
    assert len(tree) > 15
    for kind in tree:
        again = raised(failed(1, kind("what, with 3 numbers")))
        assert type(again) is kind
        assert str(again) == "what, with 3 numbers"
    assert type(raised(failed(1, IndexError("item 9")))) is IndexError


def test_an_error_that_nobody_expected_brings_its_traceback():
    """proc-5: what breaks in the owner is told with the owner's traceback."""
    try:
        {}["nothing"]
    except KeyError as error:
        message = failed(1, error)
    again = raised(message)
    assert type(again) is KeyError
    assert "test_parts" in again.__notes__[0]

    class Odd(Exception):
        pass

    strange = raised(failed(1, Odd("what?")))
    assert type(strange) is WorkerFailed
    assert "Odd" in str(strange)


def test_a_state_travels_in_pieces():
    nbytes = 2 * PIECE + 100
    sent, got = Spool(), Spool(nbytes)
    sent.file.write(bytes(range(250)) * (nbytes // 250) + bytes(nbytes % 250))
    sent.file.flush()
    assert sent.nbytes == nbytes
    assert list(places(nbytes)) == [0, PIECE, 2 * PIECE]
    for at in reversed(list(places(nbytes))):
        got.put(at, sent.piece(at))
    sent.file.seek(0)
    got.file.seek(0)
    assert got.file.read() == sent.file.read()
    for at in (-1, nbytes - 1, 1.0, None, 1 << 70):
        with pytest.raises(errors.InvalidArgument, match="do not fit"):
            got.put(at, torch.zeros(2, dtype=torch.uint8))
    for at in (-1, nbytes, "0", 1 << 70):
        with pytest.raises(errors.InvalidArgument, match="has no piece"):
            sent.piece(at)


# ---------------------------------------------------------------------- the ledger
def request(number: int, settled: int = 0) -> Message:
    return Message("extend", number, settled=settled)


def test_a_request_is_carried_out_once():
    ledger = Ledger()
    assert ledger.begin(request(1)) is None
    ledger.end(1, Message("done", 1))
    assert ledger.begin(request(1)) == Message("done", 1)
    assert ledger.begin(request(2, settled=2)) is None  # the client has the answer to 1
    assert ledger.begin(request(1)).kind == "error"
    ledger.end(2, None)
    assert ledger.begin(request(2)) is None  # one that may be carried out again


def test_a_repetition_waits_for_the_first():
    ledger = Ledger()
    assert ledger.begin(request(1)) is None
    found: list[Any] = []
    second = threading.Thread(target=lambda: found.append(ledger.begin(request(1))))
    second.start()
    ledger.end(1, Message("done", 1))
    second.join(10)
    assert found == [Message("done", 1)]


def test_a_parked_request_is_known_and_its_answer_kept():
    ledger = Ledger()
    assert ledger.begin(request(1)) is None
    ledger.park(1)
    assert ledger.begin(request(1)) == ledger.look(1) == Message("parked", 1)
    ledger.end(1, Message("done", 1))
    assert ledger.look(1) == Message("done", 1)
    assert ledger.begin(request(1)) == Message("done", 1)


# ---------------------------------------------------------------------- pending calls
class Bell:
    """`Tickets` that ring when told to, and say how often they were looked at."""

    def __init__(self) -> None:
        self.rung: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.prepared = self.slept = 0

    def prepare(self) -> int:
        self.prepared += 1
        return self.prepared

    def wait(self, ticket: int, seconds: float) -> bool:
        self.slept += 1
        self.rung.get(timeout=20)
        return True


class Parked:
    """A call that succeeds once the room is as large as its need."""

    room = 0

    def __init__(
        self, pending: PendingCalls, need: int, *, client: bytes = b"c", number: int = 0, exempt: bool = False
    ) -> None:
        self.tries = 0
        self.answers: list[Message] = []
        self.need = need
        self.call = Call(client, number or need, need, exempt, self.attempt, self.answers.append)
        pending.park(self.call)

    def attempt(self) -> Message | None:
        self.tries += 1
        if self.need > Parked.room:
            return None
        Parked.room -= self.need
        return Message("done", self.need)


@pytest.fixture
def pending():
    bell = Bell()
    pending = PendingCalls("test", bell)
    pending.bell = bell
    Parked.room = 0
    yield pending
    bell.rung.put(None)
    Parked.room = 10**9
    pending.close()


def test_a_call_is_tried_when_it_parks_and_whenever_something_changed(pending):
    call = Parked(pending, 3)
    wait_for(lambda: pending.bell.slept == 1, "the lot to sleep")
    assert not call.answers
    tries = call.tries
    assert 1 <= tries <= 2
    Parked.room = 3
    pending.bell.rung.put(None)
    wait_for(lambda: call.answers, "the answer")
    assert call.answers == [Message("done", 3)]
    assert call.tries == tries + 1
    assert len(pending) == 0


def test_a_change_between_the_first_try_and_the_parking_is_not_missed(pending):
    """The request was refused, then room came, then it was pending: nobody will ring again."""
    Parked.room = 5
    call = Parked(pending, 5)
    assert call.answers == [Message("done", 5)]


def test_the_first_come_is_served_first_and_the_hopeless_are_not_tried(pending):
    calls = [Parked(pending, need, number=i + 1) for i, need in enumerate([5, 9, 5, 3, 7])]
    wait_for(lambda: pending.bell.slept == 1, "the lot to sleep")
    before = [call.tries for call in calls]
    Parked.room = 9
    pending.bell.rung.put(None)
    wait_for(lambda: pending.bell.slept == 2, "the lot to sleep again")
    assert [bool(call.answers) for call in calls] == [True, False, False, True, False]
    assert [call.tries - tries for call, tries in zip(calls, before, strict=True)] == [1, 1, 1, 1, 0]


def test_refusals_say_nothing_about_those_outside_the_ratio(pending):
    strict, exempt = Parked(pending, 2), Parked(pending, 2, number=9, exempt=True)
    tries = exempt.tries
    pending.look()
    assert exempt.tries == tries + 1
    assert strict.answers == exempt.answers == []


def test_a_call_that_was_taken_back_is_not_carried_out(pending):
    call, other, gone = Parked(pending, 3), Parked(pending, 4), Parked(pending, 5, client=b"gone")
    assert pending.withdraw(b"c", 3)
    assert not pending.withdraw(b"c", 3)
    pending.forget(b"gone")
    Parked.room = 100
    pending.look()
    assert (call.answers, other.answers, gone.answers) == ([], [Message("done", 4)], [])


def test_at_the_end_everybody_is_tried_once_more(pending):
    call = Parked(pending, 3)
    wait_for(lambda: pending.bell.slept == 1, "the lot to sleep")
    Parked.room = 10**9
    pending.bell.rung.put(None)
    pending.close()
    assert call.answers
    late = Parked(pending, 4)
    assert late.answers == [Message("done", 4)]


def test_a_thousand_calls_take_one_thread(pending):
    before = threading.active_count()
    calls = [Parked(pending, 1, number=i + 1) for i in range(1000)]
    assert threading.active_count() == before
    Parked.room = 1000
    pending.look()
    assert all(call.answers for call in calls)


# ---------------------------------------------------------------------- lines
class Office:
    """An owner's end that answers every request with its own kind and payload, and hangs up at "fail"."""

    def __init__(self) -> None:
        self.here: list[Any] = []
        self.left: list[Any] = []
        self.token = secrets.token_bytes(16)
        self.allowance = Allowance(8 * STEP)
        self.board = Listener(
            "127.0.0.1",
            token=self.token,
            allowance=self.allowance,
            came=self.here.append,
            serve=self.serve,
            left=self.left.append,
        )

    def serve(self, caller: Any, head: bytearray) -> None:
        payload = caller.payload(head, 1 << 30)
        asked = decode(head, payload)
        if asked.kind == "fail":
            raise ConnectionError("no more")
        caller.answer(asked.number, *encode(Message(asked.kind, asked.number, {}, asked.tensors)))


@pytest.fixture
def office():
    made = Office()
    yield made
    made.board.close()


def dial(office: Office, token: bytes | None = None) -> Connection:
    return Connection(office.board.address, office.token if token is None else token, timeout=10)


def ask(line: Connection, number: int, kind: str = "say", **tensors: torch.Tensor) -> None:
    line.ask(*encode(Message(kind, number, {}, tensors)))


def heard(line: Connection, slot: Any) -> Message:
    return decode(*line.wait(slot, 10))


def test_answers_and_notices_find_their_slot(office):
    line = dial(office)
    slots = {n: line.open(n) for n in (3, 5)}
    rows = torch.arange(10 * SMALL).to(torch.uint8)
    ask(line, 5, rows=rows)
    ask(line, 3, "short")
    assert heard(line, slots[3]).kind == "short"
    assert torch.equal(heard(line, slots[5]).tensors["rows"], rows)
    office.here[0].notify(3)
    assert line.wait(slots[3], 10) == COLLECT
    line.shut(5)
    ask(line, 5, rows=rows)  # nobody waits for this answer: it is dropped
    ask(line, 3)
    assert heard(line, slots[3]).number == 3
    line.close()
    wait_for(lambda: office.left == office.here, "the owner to notice")


def test_a_stranger_learns_nothing(office):
    with pytest.raises(PeerLost, match="not the owner"):
        dial(office, token=bytes(16))
    with pytest.raises(PeerLost, match="nobody answers"):
        Connection(("127.0.0.1", 1), bytes(16), timeout=5)
    assert office.here == []


def test_a_wait_ends_in_time(office):
    """Whoever listens for others too gives up when his own time is over."""
    line = dial(office)
    for seconds in (0, 0.01):
        with pytest.raises(queue.Empty):
            line.wait(line.open(3), seconds)
    line.close()


def test_one_listens_for_all(office):
    """Of the threads that wait, any may leave, with an answer or without: another goes on listening."""
    line, got = dial(office), {}
    slots = {n: line.open(n) for n in range(1, 13)}

    def wait(n: int) -> None:
        try:
            got[n] = decode(*line.wait(slots[n], 0.02 * n if n % 2 else 30)).number
        except queue.Empty:
            got[n] = "too late"
        line.shut(n)

    threads = [threading.Thread(target=wait, args=(n,)) for n in slots]
    for thread in threads:
        thread.start()
    wait_for(lambda: len(got) == 6, "the odd ones to give up")
    for n in (4, 12, 2, 8, 10, 6):
        ask(line, n)
    for thread in threads:
        thread.join(10)
    assert got == {n: "too late" if n % 2 else n for n in slots}
    line.close()


def test_many_lines_at_once(office):
    lines = [dial(office) for _ in range(20)]
    slots = [line.open(4) for line in lines]
    for line in lines:
        ask(line, 4)
    assert [heard(line, slot).number for line, slot in zip(lines, slots, strict=True)] == [4] * 20
    assert len({line.id for line in lines}) == 20
    for line in lines:
        line.close()


@pytest.mark.parametrize("how", ["closed", "lost"])
def test_whoever_waits_hears_the_end(office, how):
    line = dial(office)
    slot = line.open(1)
    if how == "closed":
        office.board.close()
    else:
        ask(line, 1, "fail")
    assert line.wait(slot, 10) is None
    assert line.end == how
    assert line.wait(line.open(2), 10) is None  # also who comes later
    with pytest.raises(ConnectionError):
        ask_often(line)
    line.close()


def ask_often(line: Connection) -> None:
    """The first request after the end may still find room in a buffer of the kernel's."""
    for _ in range(100):
        line.ask(b"x" * 1000)


def test_what_is_too_long_or_strange_ends_that_line_only(office):
    good, bad = dial(office), dial(office)
    bad._socket.sendall(b"\xff\xff\xff\xff")
    wait_for(lambda: bad.look() is not None, "the owner to hang up")
    slot = good.open(2)
    ask(good, 2, "ok")
    assert heard(good, slot).kind == "ok"
    good.close()
    bad.close()


def test_a_client_that_does_not_listen_is_hung_up_on(office):
    """Notices block nobody: those of a stopped client pile up until its line is cut."""
    with socket.create_connection(office.board.address, timeout=10) as deaf:
        deaf.sendall(office.token + bytes(16))
        wait_for(lambda: office.here, "the owner to accept")
        for _ in range(1_000_000):
            office.here[0].notify(1)
            if office.left:
                break
        wait_for(lambda: office.left, "the owner to hang up")


def test_probes_are_on(office):
    """A host that is gone says nothing: the kernel must ask."""
    line = dial(office)
    for name, value in (("SO_KEEPALIVE", 1),):
        assert line._socket.getsockopt(socket.SOL_SOCKET, getattr(socket, name)) == value
    if hasattr(socket, "TCP_KEEPIDLE"):
        idle, interval, count = (
            line._socket.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
            for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
        )
        assert idle + interval * count < 5
    line.close()


def test_a_mismatch_names_the_difference():
    error = raised(failed(3, SchemaMismatch("action: expected float32[3], got float32[4]")))
    assert "action" in str(error)
