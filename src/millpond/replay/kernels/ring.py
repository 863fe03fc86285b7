"""The usual write, and the usual samples, in one compiled step each. Imported at the first use only.

What is done here, and in which order, is what `Writer`, `Reader` and `Updater` do; `ControlBlock`, `RobustMutex` and
`EventCount` say why it survives a SIGKILL at any instant. Whatever is not usual (the lock is taken, a holder died, the
buffer is closed, items are missing, ...) is left to them: the answer is `SLOW`, and nothing was changed. What samples
answers how often the buffer was emptied before. All kernels keep the GIL.

All that a kernel must know lies in one int64 array, the ``plan``; the names below are places in it. Memory is given by
address, as that takes a tenth of the time of an array.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from millpond.replay.kernels.compile import (
    announce,
    carray,
    compiled,
    external,
    fence,
    inlined,
    load,
    load_half,
    place,
    store,
    store_half,
)
from millpond.replay.kernels.gather import copy_rows, gather, gather_released
from millpond.replay.kernels.tree import sum_above, walk

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

#: What this is compiled together with (`tests/replay/test_kernels.py` knows): Numba's cache looks at this file alone.
SOURCES = "a1314ee22ec6da78"

__all__ = ["PLAN", "gather", "gather_released", "put", "set_leaves", "take_oldest", "take_prioritized", "take_uniform"]

DONE, AGAIN, SLOW = 0, -1, -2  # as in `fast path`

PLAN = (
    # Addresses: pthread_mutex_t; the word that remembers a dead holder; the commit word; both records; the intent; the
    # events; the rows; the receipts; the last writer (0: of no interest); the sum tree with its offsets and sizes,
    # the priorities beside its leaves, and the version of the settings that these were computed with, where there is
    # one.
    "MUTEX DEBT COMMIT RECORD_0 RECORD_1 INTENT ITEMS_EVENT SPACE_EVENT ROWS RECEIPTS WRITER TREE OFFSETS SIZES "
    "PRIORITIES SETTINGS "
    # Numbers: 64-bit words of a row, of a record and of the tree; its levels; may old items give way; the rules of the
    # flow, of which RATE_ABOVE is 0 and DEBT_LIMIT is -1 where there is none; the system call.
    "WIDTH RECORD_WORDS TREE_WORDS LEVELS CAPACITY OVERWRITES MIN_SIZE RATE_ABOVE RATE_BELOW DEBT_LIMIT FUTEX "
    # Which word of a record is which.
    "SETTLED HEAD TAIL LIVE STORED WRITES OVERWRITTEN CONSUMED TAKES CALLS RETURNED "
    "EXEMPT_WRITES EXEMPT_SAMPLES RESERVED CLOSED LAST_INSERT LAST_SAMPLE REDO REWRITES EMPTIED "
    "RECEIPT_LINE RECEIPT_NUMBER"
).split()
(
    MUTEX,
    DEBT,
    COMMIT,
    RECORD_0,
    RECORD_1,
    INTENT,
    ITEMS_EVENT,
    SPACE_EVENT,
    ROWS,
    RECEIPTS,
    WRITER,
    TREE,
    OFFSETS,
    SIZES,
    PRIORITIES,
    SETTINGS,
    WIDTH,
    RECORD_WORDS,
    TREE_WORDS,
    LEVELS,
    CAPACITY,
    OVERWRITES,
    MIN_SIZE,
    RATE_ABOVE,
    RATE_BELOW,
    DEBT_LIMIT,
    FUTEX,
    SETTLED,
    HEAD,
    TAIL,
    LIVE,
    STORED,
    WRITES,
    OVERWRITTEN,
    CONSUMED,
    TAKES,
    CALLS,
    RETURNED,
    EXEMPT_WRITES,
    EXEMPT_SAMPLES,
    RESERVED,
    CLOSED,
    LAST_INSERT,
    LAST_SAMPLE,
    REDO,
    REWRITES,
    EMPTIED,
    RECEIPT_LINE,
    RECEIPT_NUMBER,
) = range(len(PLAN))

TRIES = 64  # of a lock that is taken: some µs
EBUSY, EOWNERDEAD = 16, 130
SEQUENCE, AWAITED = 16, 20  # bytes into an event: see `EventCount`
WAKE_OP, ADD_1, ALL = 5, 1 << 28 | 1 << 12, 0x7FFFFFFF
_MASK = 0xFFFFFFFF

_trylock = external("pthread_mutex_trylock", types.int32(types.intp))
_unlock = external("pthread_mutex_unlock", types.int32(types.intp))
_consistent = external("pthread_mutex_consistent", types.int32(types.intp))
_syscall = external("syscall", types.intp(*[types.intp] * 7))
_memmove = external("memmove", types.intp(types.intp, types.intp, types.intp))


@inlined
def _ints(address: int, n: int) -> Any:
    return carray(place(address), (n,), np.int64)


@inlined
def _floats(address: int, n: int) -> Any:
    return carray(place(address), (n,), np.float64)


@inlined
def _word(plan: Ints, record: int, name: int) -> int:
    return load(record + 8 * plan[name])


@inlined
def _set(plan: Ints, record: int, name: int, value: int) -> None:
    store(record + 8 * plan[name], value)


@inlined
def _in_force(plan: Ints) -> int:
    return int(plan[RECORD_0] if load_half(plan[COMMIT]) & 1 == 0 else plan[RECORD_1])


@inlined
def _enter(plan: Ints) -> int:
    """Take the lock. The record in force; 0: not now, or something must be mended first, and the lock is not held."""
    mutex = plan[MUTEX]
    code = _trylock(mutex)
    tries = 0
    while code == EBUSY and tries < TRIES:
        tries += 1
        code = _trylock(mutex)
    if code == EOWNERDEAD:
        store_half(plan[DEBT], 1)  # whoever locks next hears of it
        _consistent(mutex)
        _unlock(mutex)
        return 0
    if code != 0:
        return 0
    record = _in_force(plan)
    if (
        load_half(plan[DEBT]) != 0
        or load(plan[INTENT]) != _word(plan, record, SETTLED)
        or _word(plan, record, CLOSED) != 0
        or _word(plan, record, REDO) != 0
        or _word(plan, record, REWRITES) & 1 != 0
    ):
        _unlock(mutex)
        return 0
    return record


@inlined
def _leave(plan: Ints) -> None:
    _unlock(plan[MUTEX])


@inlined
def _copied(plan: Ints, record: int) -> int:
    """The other record, made equal to the one in force: what is changed there comes into force with `_commit`."""
    other = int(plan[RECORD_0] + plan[RECORD_1] - record)
    for i in range(plan[RECORD_WORDS]):
        store(other + 8 * i, load(record + 8 * i))
    return other


@inlined
def _commit(plan: Ints) -> None:
    fence()
    store_half(plan[COMMIT], (load_half(plan[COMMIT]) + 1) & _MASK)
    fence()


@inlined
def _publish(plan: Ints, event: int) -> bool:
    """`_commit`, and wake those that wait for the event, indivisibly. False: the system refused, nothing is in
    force."""
    at = plan[event]
    fence()
    store_half(at + SEQUENCE, (load_half(at + SEQUENCE) + 1) & _MASK)
    if load_half(at + AWAITED) == 0:
        store_half(plan[COMMIT], (load_half(plan[COMMIT]) + 1) & _MASK)
        fence()
        return True
    if _syscall(plan[FUTEX], at + SEQUENCE, WAKE_OP, ALL, 0, plan[COMMIT], ADD_1) < 0:
        return False
    store_half(at + AWAITED, 0)
    return True


@inlined
def _gather(plan: Ints, slots: Ints, out: int) -> None:
    n, width = slots.size, plan[WIDTH]
    copy_rows(_ints(plan[ROWS], plan[CAPACITY] * width), slots, carray(place(out), (n, width), np.int64))


@inlined
def _may_sample(plan: Ints, record: int, n: int) -> bool:
    """As `limiter.sample_block` says, apart from the number of items."""
    beyond = _word(plan, record, WRITES) - plan[MIN_SIZE]
    if beyond < 0:
        return False
    if plan[RATE_ABOVE] == 0:
        return True
    beyond -= _word(plan, record, EXEMPT_WRITES)
    allowed = plan[RATE_ABOVE] * beyond
    drawn = _returned(plan, record) + _word(plan, record, RESERVED)
    return bool((drawn + n) * plan[RATE_BELOW] <= allowed)


@inlined
def _may_insert(plan: Ints, record: int, n: int) -> bool:
    """As `limiter.insert_block` says, apart from space."""
    if plan[DEBT_LIMIT] < 0:
        return True
    beyond = _word(plan, record, WRITES) + n - plan[MIN_SIZE] - _word(plan, record, EXEMPT_WRITES)
    owed = plan[RATE_ABOVE] * beyond - plan[RATE_BELOW] * _returned(plan, record)
    return bool(beyond <= 0 or owed <= plan[DEBT_LIMIT])


@inlined
def _returned(plan: Ints, record: int) -> int:
    return _word(plan, record, RETURNED) - _word(plan, record, EXEMPT_SAMPLES)


@inlined
def _sampled(plan: Ints) -> bool:
    """Commit a sample, and wake producers if they may have waited for it. False: as `_publish`."""
    if plan[DEBT_LIMIT] >= 0:
        return _publish(plan, SPACE_EVENT)
    _commit(plan)
    return True


@inlined
def _delivered(plan: Ints, record: int, n: int) -> int:
    """The record to come, with a batch of n items counted."""
    made = _copied(plan, record)
    _set(plan, made, LAST_SAMPLE, n)
    _set(plan, made, TAKES, _word(plan, record, TAKES) + 1)
    _set(plan, made, CALLS, _word(plan, record, CALLS) + 1)
    _set(plan, made, RETURNED, _word(plan, record, RETURNED) + n)
    return made


@inlined
def _all_live(plan: Ints, record: int, numbers: Ints) -> bool:
    lowest = _word(plan, record, HEAD)
    for i in range(numbers.size):
        lowest = min(lowest, numbers[i])
    return lowest >= _word(plan, record, TAIL)


@inlined
def _deliver(plan: Ints, n: int, tail: int, emptied: int, rewrites: int, numbers: Ints) -> int:
    """Count a batch that was gathered without the lock, if all of it is still what it was."""
    record = _enter(plan)
    if record == 0:
        return SLOW
    if (
        _word(plan, record, EMPTIED) != emptied
        or _word(plan, record, REWRITES) != rewrites
        or (_word(plan, record, TAIL) != tail and not _all_live(plan, record, numbers))
    ):
        _leave(plan)
        return AGAIN
    if not _may_sample(plan, record, n):
        _leave(plan)
        return SLOW
    _delivered(plan, record, n)
    done = _sampled(plan)
    _leave(plan)
    return emptied if done else SLOW


@compiled("int64(int64[::1], int64, int64, int64, int64, int64)")
def take_uniform(plan: Ints, n: int, live: int, numbers_at: int, slots_at: int, out: int) -> int:
    """Sample n items of a ring. At ``numbers_at`` lie their positions, drawn for so many ``live`` items; their numbers
    take their place."""
    numbers = _ints(numbers_at, n)
    slots = _ints(slots_at, n)
    before, record = load_half(plan[COMMIT]), _in_force(plan)
    fence()
    tail, found = _word(plan, record, TAIL), _word(plan, record, LIVE)
    emptied, rewrites = _word(plan, record, EMPTIED), _word(plan, record, REWRITES)
    fence()
    if load_half(plan[COMMIT]) != before or found != live:
        return AGAIN
    capacity = plan[CAPACITY]
    start = tail % capacity
    for i in range(n):
        slot = numbers[i] + start
        slots[i] = slot - capacity if slot >= capacity else slot
        numbers[i] += tail
    _gather(plan, slots, out)
    return _deliver(plan, n, tail, emptied, rewrites, numbers)


@compiled("int64(int64[::1], int64, int64, int64, int64)")
def take_oldest(plan: Ints, n: int, numbers_at: int, slots_at: int, out: int) -> int:
    """Sample the n oldest items of a ring, once and for all."""
    numbers = _ints(numbers_at, n)
    slots = _ints(slots_at, n)
    before, record = load_half(plan[COMMIT]), _in_force(plan)
    fence()
    tail, live, emptied = _word(plan, record, TAIL), _word(plan, record, LIVE), _word(plan, record, EMPTIED)
    rewrites = _word(plan, record, REWRITES)
    fence()
    if load_half(plan[COMMIT]) != before:
        return AGAIN
    if live < n:
        return SLOW
    capacity = plan[CAPACITY]
    for i in range(n):
        numbers[i] = tail + i
        slots[i] = numbers[i] % capacity
    _gather(plan, slots, out)
    record = _enter(plan)
    if record == 0:
        return SLOW
    if (
        _word(plan, record, TAIL) != tail
        or _word(plan, record, LIVE) < n
        or _word(plan, record, EMPTIED) != emptied
        or _word(plan, record, REWRITES) != rewrites
    ):
        _leave(plan)
        return AGAIN
    if not _may_sample(plan, record, n):
        _leave(plan)
        return SLOW
    made = _delivered(plan, record, n)
    _set(plan, made, TAIL, tail + n)
    _set(plan, made, LIVE, _word(plan, record, LIVE) - n)
    _set(plan, made, CONSUMED, _word(plan, record, CONSUMED) + n)
    done = _publish(plan, SPACE_EVENT)
    _leave(plan)
    return emptied if done else SLOW


@compiled("int64(int64[::1], int64, boolean, int64, int64, int64, int64, int64)")
def take_prioritized(
    plan: Ints, n: int, stratified: bool, mass_at: int, shares_at: int, numbers_at: int, slots_at: int, out: int
) -> int:
    """Sample n items of a ring by their leaves. At ``mass_at`` lie numbers in [0, 1); at ``shares_at`` then lies the
    least leaf divided by each item's."""
    numbers = _ints(numbers_at, n)
    slots = _ints(slots_at, n)
    mass = _floats(mass_at, n)
    shares = _floats(shares_at, n)
    tree = _floats(plan[TREE], plan[TREE_WORDS])
    offsets = _ints(plan[OFFSETS], plan[LEVELS] + 1)
    sizes = _ints(plan[SIZES], plan[LEVELS])
    before, record, version = load_half(plan[COMMIT]), _in_force(plan), load(plan[SETTINGS])
    fence()
    head, tail = _word(plan, record, HEAD), _word(plan, record, TAIL)
    emptied, rewrites = _word(plan, record, EMPTIED), _word(plan, record, REWRITES)
    fence()
    root = plan[TREE_WORDS] - 32
    total, lowest = tree[root], tree[root + 8]
    if not total > 0.0 or version & 1:
        return SLOW
    if load_half(plan[COMMIT]) != before:
        return AGAIN
    if stratified:
        step = total / n
        for i in range(n):
            mass[i] = (i + mass[i]) * step
    else:
        for i in range(n):
            mass[i] *= total
    walk(tree, offsets, sizes, mass, shares, slots)
    capacity, last = plan[CAPACITY], head - 1
    for i in range(n):
        numbers[i] = last - (last - slots[i]) % capacity
        if numbers[i] < tail:
            return AGAIN  # a priority is changed a moment before, or after, the state is
        shares[i] = min(lowest / shares[i], 1.0) if shares[i] > 0.0 else 1.0  # 0: its item left meanwhile
    fence()
    if load(plan[SETTINGS]) != version:
        return AGAIN  # the leaves were computed anew meanwhile
    _gather(plan, slots, out)
    return _deliver(plan, n, tail, emptied, rewrites, numbers)


@inlined
def _begin(plan: Ints, record: int, pid: int, count: int, start: int) -> int:
    """Note what is about to be changed outside of the records. The number that settles it."""
    intent = plan[INTENT]
    number = _word(plan, record, SETTLED) + 1
    store(intent + 8, pid)
    store(intent + 16, count)
    store(intent + 24, start)
    fence()
    store(intent, number)
    fence()
    return number


@compiled("int64(int64[::1], int64, int64, int64, int64, int64, int64[::1])")
def put(plan: Ints, pid: int, rows: int, line: int, number: int, writer: int, slots: Ints) -> int:
    """Write ``rows`` behind the youngest item of a ring, into the ``slots`` that are returned.

    ``line`` is 1 + the line of the write's receipt, 0 where it leaves none. Where it matters who wrote last, it must be
    this ``writer``: otherwise the new items do not follow the last ones, and `Order` notes that.
    """
    n = slots.size
    record = _enter(plan)
    if record == 0:
        return SLOW
    capacity, head, live = plan[CAPACITY], _word(plan, record, HEAD), _word(plan, record, LIVE)
    excess = live + n - capacity
    if n > capacity or (excess > 0 and plan[OVERWRITES] == 0) or not _may_insert(plan, record, n):
        _leave(plan)
        return SLOW
    if plan[WRITER] != 0 and load(plan[WRITER]) != writer:
        _leave(plan)
        return SLOW
    settled = _begin(plan, record, pid, n, head)
    if excess > 0:  # what will be overwritten ceases to exist first
        made = _copied(plan, record)
        live -= excess
        _set(plan, made, TAIL, _word(plan, record, TAIL) + excess)
        _set(plan, made, LIVE, live)
        _set(plan, made, OVERWRITTEN, _word(plan, record, OVERWRITTEN) + excess)
        _commit(plan)
        record = made
    width, start = 8 * plan[WIDTH], head % capacity
    before = min(n, capacity - start)
    _memmove(plan[ROWS] + start * width, rows, before * width)
    if before < n:
        _memmove(plan[ROWS], rows + before * width, (n - before) * width)
    for i in range(n):
        slots[i] = start + i if i < before else i - before
    earlier = _word(plan, record, RECEIPT_LINE)
    if line != 0 and earlier != 0:
        store(plan[RECEIPTS] + 8 * (earlier - 1), _word(plan, record, RECEIPT_NUMBER))
    made = _copied(plan, record)
    _set(plan, made, HEAD, head + n)
    _set(plan, made, WRITES, _word(plan, record, WRITES) + n)
    _set(plan, made, LIVE, live + n)
    _set(plan, made, STORED, min(capacity, _word(plan, record, STORED) + n))
    _set(plan, made, LAST_INSERT, n)
    if line != 0:
        _set(plan, made, RECEIPT_LINE, line)
        _set(plan, made, RECEIPT_NUMBER, number)
    _set(plan, made, SETTLED, settled)
    done = _publish(plan, ITEMS_EVENT)
    _leave(plan)
    return DONE if done else SLOW  # SLOW: the intent is not settled, so that the next one mends what is half done


@compiled("int64(int64[::1], int64, int64, int64[::1], int64[::1], float64[::1], float64[::1])")
def set_leaves(
    plan: Ints, pid: int, version: int, slots: Ints, numbers: Ints, priorities: Floats, leaves: Floats
) -> int:
    """Give items of a ring other priorities, and the leaves that follow from them by the settings of this version; of
    an item named twice the last counts.

    Returns how many items are still live, or -1: not now, and nothing was changed.
    """
    n, capacity = slots.size, plan[CAPACITY]
    tree = _floats(plan[TREE], plan[TREE_WORDS])
    offsets = _ints(plan[OFFSETS], plan[LEVELS] + 1)
    beside = _floats(plan[PRIORITIES], offsets[1])
    sizes = _ints(plan[SIZES], plan[LEVELS])
    for i in range(n):
        if slots[i] < 0 or slots[i] >= capacity:
            return -1
        announce(tree, slots[i])
    record = _enter(plan)
    if record == 0:
        return -1
    head, youngest = _word(plan, record, HEAD), 0
    for i in range(n):
        youngest = max(youngest, numbers[i])
    if youngest >= head or load(plan[SETTINGS]) != version or not _all_live(plan, record, numbers):
        _leave(plan)
        return -1
    settled = _begin(plan, record, pid, n, 0)
    for i in range(n):
        beside[slots[i]] = priorities[i] + 0.0  # -0.0 becomes 0.0
        tree[slots[i]] = leaves[i] + 0.0
    sum_above(tree, beside, offsets, sizes, slots)
    made = _copied(plan, record)
    _set(plan, made, SETTLED, settled)
    done = _publish(plan, ITEMS_EVENT)
    _leave(plan)
    return n if done else -1
