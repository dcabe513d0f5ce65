"""Several tensors at a time: threads that read ahead, or write files of their own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import TypeVar

T = TypeVar("T")


def in_order(calls: Iterable[Callable[[], T]], workers: int) -> Iterator[T]:
    """What the calls return, in their order; what is made and not yet taken, or being used, is ``workers`` at most.

    Threads do: reading, writing and checksums, and torch's operations, let others run meanwhile.
    """
    if workers <= 1:
        yield from (call() for call in calls)
        return
    with ThreadPoolExecutor(workers) as pool:
        waiting: deque[Future[T]] = deque()
        try:
            for call in calls:
                if len(waiting) == workers:
                    yield waiting.popleft().result()
                waiting.append(pool.submit(call))
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def all_done(calls: Iterable[Callable[[], object]], workers: int) -> None:
    """Make the calls, ``workers`` at a time; a long one does not hold up others.

    Raises the first error; calls that have not begun by then are not made.
    """
    if workers <= 1:
        for call in calls:
            call()
        return
    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(call) for call in calls]
        try:
            for future in as_completed(futures):
                future.result()
        finally:
            for future in futures:
                future.cancel()
