"""One, two and four producer processes beside one sampler on one shared buffer; and a blocking queue of two
processes."""

from __future__ import annotations

import multiprocessing as mp
import time
from queue import Empty
from typing import Any

import torch

from benchmarks import hopper
from benchmarks.harness import Cell, report
from millpond import BlockingReplayBuffer, ReplayBuffer

SECONDS, BATCH = 2.0, 256
CAPACITY, ROWS = 1024, 64


def main() -> None:
    """Print the tables of producers and of the queue."""
    torch.set_num_threads(1)
    lines: list[dict[str, Cell]] = []
    base = 0.0
    for producers in (1, 2, 4):
        written, sampled = _many(producers)
        base = base or written
        lines.append(
            {
                "producers": producers,
                "M items written a second": round(written / 1e6, 2),
                "of one producer": round(written / base, 2),
                "M items sampled a second": round(sampled / 1e6, 2),
            }
        )
    report(
        "producers",
        "Producers beside a sampler",
        lines,
        notes=f"Batches of {BATCH} Hopper transitions, capacity 100,000.",
    )
    queue, buffer = _through_queue(), _through_buffer()
    report(
        "consume_refill",
        "Consuming and refilling: two processes, capacity 1,024, batches of 64",
        [
            {"what": "multiprocessing.Queue", "K items a second": round(queue / 1e3, 1), "ratio": 1.0},
            {
                "what": "BlockingReplayBuffer",
                "K items a second": round(buffer / 1e3, 1),
                "ratio": round(buffer / queue, 1),
            },
        ],
        notes="The same packed rows of Hopper transitions; the queue carries them as NumPy arrays.",
    )


def _many(producers: int) -> tuple[float, float]:
    context = mp.get_context("fork")
    with ReplayBuffer(100_000, shared=True) as rb:
        rb.extend(hopper.transitions(BATCH))
        stop = context.Event()
        processes = [context.Process(target=_produce, args=(rb, stop)) for _ in range(producers)]
        for process in processes:
            process.start()
        time.sleep(0.5)
        before, began, sampled = rb.write_count, time.perf_counter(), 0
        while time.perf_counter() - began < SECONDS:
            rb.sample(BATCH)
            sampled += BATCH
        seconds = time.perf_counter() - began
        written = rb.write_count - before
        stop.set()
        for process in processes:
            process.join()
        return written / seconds, sampled / seconds


def _produce(rb: ReplayBuffer, stop: Any) -> None:
    torch.set_num_threads(1)
    batch = hopper.transitions(BATCH)
    while not stop.is_set():
        for _ in range(20):
            rb.extend(batch)


def _through_buffer() -> float:
    context = mp.get_context("fork")
    with BlockingReplayBuffer(CAPACITY, shared=True) as rb:
        rb.extend(hopper.transitions(ROWS))
        producer = context.Process(target=_refill, args=(rb,))
        producer.start()
        for _ in range(200):
            rb.sample(ROWS, wait=True)
        began, items = time.perf_counter(), 0
        while time.perf_counter() - began < SECONDS:
            rb.sample(ROWS, wait=True)
            items += ROWS
        seconds = time.perf_counter() - began
        rb.close()
        producer.join()
        return items / seconds


def _refill(rb: BlockingReplayBuffer) -> None:
    torch.set_num_threads(1)
    batch = hopper.transitions(ROWS)
    try:
        while True:
            rb.extend(batch)
    except RuntimeError:  # closed
        return


def _through_queue() -> float:
    context = mp.get_context("fork")
    queue: Any = context.Queue(CAPACITY // ROWS)
    stop = context.Event()
    producer = context.Process(target=_feed, args=(queue, stop))
    producer.start()
    for _ in range(200):
        queue.get()
    began, items = time.perf_counter(), 0
    while time.perf_counter() - began < SECONDS:
        queue.get()
        items += ROWS
    seconds = time.perf_counter() - began
    stop.set()
    while producer.is_alive():
        try:
            queue.get(timeout=0.05)
        except Empty:  # empty: the producer is about to end
            break
    producer.join()
    queue.close()
    return items / seconds


def _feed(queue: Any, stop: Any) -> None:
    rows = torch.zeros(ROWS, 112, dtype=torch.uint8).numpy()
    while not stop.is_set():
        queue.put(rows)
    queue.cancel_join_thread()
