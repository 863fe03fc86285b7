"""The words of a buffer's state: 64-bit counters and cursors, changed only by commits of the control block."""

from __future__ import annotations

NAMES = (
    "head tail live stored writes overwritten consumed dropped takes calls returned exempt_writes exempt_samples stale "
    "producer_blocks consumer_blocks closed bound pressure last_insert last_sample redo rewrites "
    "reserved prefetched epoch epoch_head epoch_size epoch_cursor epoch_half receipt_line receipt_number emptied "
    "user0 user1 user2 user3"
).split()
WORDS = len(NAMES)

(
    HEAD,  # number that the next item gets; the numbers of live items are below it
    TAIL,  # ring only: live exactly if TAIL <= number < HEAD
    LIVE,  # items that a sample may return
    STORED,  # slots that hold, or held, an item
    WRITES,  # items ever written
    OVERWRITTEN,  # live items evicted by new ones
    CONSUMED,  # items that left after their last delivery
    DROPPED,  # items refused by the admission policy "drop_newest"
    TAKES,  # batches drawn, also ahead
    CALLS,  # batches delivered
    RETURNED,  # items delivered
    EXEMPT_WRITES,  # of WRITES: beyond min_size, and outside the ratio (`unlimited`)
    EXEMPT_SAMPLES,  # of RETURNED: outside the ratio
    STALE,  # updates for slots that were rewritten meanwhile
    PRODUCER_BLOCKS,
    CONSUMER_BLOCKS,
    CLOSED,
    BOUND,  # the schema is known and the rows are allocated
    PRESSURE,  # above the high watermark, and not yet down to the low one; 2: as long as somebody waits who began it
    LAST_INSERT,  # items of the latest write and of the latest sample within the limits: the sizes in use
    LAST_SAMPLE,
    REDO,  # entries of the redo log that are still to be applied
    REWRITES,  # odd while rows are changed in place: whoever gathered meanwhile gathers again
    RESERVED,  # items drawn ahead and not delivered yet, and in how many batches
    PREFETCHED,
    EPOCH,  # SamplerWithoutReplacement: epochs begun; the list in force and the place in it
    EPOCH_HEAD,
    EPOCH_SIZE,
    EPOCH_CURSOR,
    EPOCH_HALF,
    RECEIPT_LINE,  # 1 + line of the receipt that the latest write left; 0: none
    RECEIPT_NUMBER,
    EMPTIED,  # times that everything was dropped (`empty`, a load)
    USER,  # four words for samplers that users write
) = (*range(WORDS - 4), WORDS - 4)

PRODUCER, CONSUMER = 1, 2  # roles in the table of waiters
WRITABLE, SAMPLEABLE = 3, 4  # advisory ones: who only asks may wait, and blocks nobody
PRESSING = 5  # a producer that found too little room below the high watermark: others wait with it for the low one
PRODUCERS, CONSUMERS = (PRODUCER, PRESSING, WRITABLE), (CONSUMER, SAMPLEABLE)
ITEMS, SPACE = 0, 1  # events: there is more to sample; there is more room
RECEIPT_LINES = 64
