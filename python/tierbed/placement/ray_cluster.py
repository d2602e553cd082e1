"""Placements built on several machines: parts of them as tasks of a Ray cluster.

The driver hands out parts and puts the results together; the kernel inside each task is the one of
a single machine, and so is the placement, to the last bit. The log is the driver's, or lies in
blocks with the workers (:mod:`tierbed.placement.ray_log`) and is never seen by the driver::

    log ─▶ [part] ─▶ split ─▶ [part][part] ─▶ … ─▶ order each ─▶ homes
    blocks of the log ─▶ scores of each ─▶ bases ─▶ replica pages of some bases each ─▶ placement

``shp`` and ``maxembed`` are built so; other methods are built whole, in one task. A task that is
lost with its worker or its machine is done again: its result depends on what it was given alone.
Ray carries what has to be moved and nothing else, and is needed by nobody who does not ask for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from tierbed import _native
from tierbed._native import NativePlacement, NativeQueryLog
from tierbed.errors import InvalidError, UnsupportedError
from tierbed.placement.build import Placement, PlaceOptions, QueryLog
from tierbed.placement.ray_log import RETRIES, RayQueryLog, bytes_of, log_of_blocks, placement_of

__all__ = ["place_on_ray", "ray_cluster"]

#: Parts per processor of the cluster: what is left to balance.
PARTS_PER_CPU = 4
#: Bytes of Ray's shared memory where it is started here.
OBJECT_STORE_BYTES = 256 << 20

Ref = Any
Progress = Callable[[int, int], None]


def _split(part: bytes, options: PlaceOptions) -> tuple[bytes, bytes]:
    return _native.bisection_split(part, options)


def _order(part: bytes, options: PlaceOptions) -> bytes:
    return _native.bisection_order(part, options)


def _log(row_count: int, block: Any) -> NativeQueryLog:
    """The log of a block: packed by the driver, or a table of the cluster."""
    return (
        NativeQueryLog.unpack(block)
        if isinstance(block, bytes)
        else log_of_blocks(row_count, block)
    )


def _scores(homes: tuple[list[bytes], int, int], block: Any) -> bytes:
    return _native.placement_scores(_native.bisection_end(*homes), _log(homes[1], block))


def _pages(homes: tuple[list[bytes], int, int], log: bytes, bases: list[int]) -> list[list[int]]:
    return _native.placement_pages(_native.bisection_end(*homes), NativeQueryLog.unpack(log), bases)


def _whole(log: bytes, misses: bytes | None, options: PlaceOptions, ratio: float) -> bytes:
    given = NativeQueryLog.unpack(log)
    missed = None if misses is None else NativeQueryLog.unpack(misses)
    [placement] = NativePlacement.build(given, missed, options, [ratio], None, None, None)
    return bytes_of(placement)


class _DriverLog:
    """A log that the driver has; the calls of a :class:`RayQueryLog` that a build makes."""

    def __init__(self, ray: Any, log: NativeQueryLog) -> None:
        self._ray = ray
        self._log = log
        self.row_count = log.row_count

    def begin(self, options: PlaceOptions) -> tuple[Ref, int]:
        root, pages = _native.bisection_begin(self._log, options)
        return self._ray.put(root), pages

    def packed(self) -> Ref:
        return self._ray.put(self._log.pack())

    def cut(self, count: int) -> list[Ref]:
        """Cuts the log into ``count`` blocks of queries."""
        blocks, rest = [], self._log
        for left in range(count, 1, -1):
            block, rest = rest.split(1.0 / left)
            if block.query_count:
                blocks.append(block)
        return [self._ray.put(block.pack()) for block in [*blocks, rest]]


def place_on_ray(
    log: QueryLog | RayQueryLog,
    options: PlaceOptions | None = None,
    *,
    address: str = "local",
    misses: QueryLog | None = None,
    ratio: float = 0.1,
    parts: int | None = None,
    progress: Progress | None = None,
) -> Placement:
    """Places the rows of a log as :func:`tierbed.place` does, on the machines of a Ray cluster.

    Args:
        log: The queries: the driver's, or blocks of the cluster that this process is connected to.
        options: How rows are placed; by default by ``maxembed``. ``shp`` and ``maxembed`` are built
            in parts, other methods in one task. Tasks have one thread each.
        address: Where the cluster is; ``local`` starts one on this machine. A cluster that the
            process is connected to already is used whatever the address.
        misses: As for :func:`tierbed.place`.
        ratio: Replicas per row of the table.
        parts: Parts a bisection is taken apart into; by default four per processor.
        progress: Called with tasks done and tasks in all, for each step.

    Raises:
        UnsupportedError: Ray is not installed.
        InvalidError: An option is out of range, or unknown.
    """
    options = replace(options or PlaceOptions(method="maxembed"), threads=1)
    method = options.method
    if dict(_native.placement_methods()).get(method) is None:
        names = ", ".join(name for name, _ in _native.placement_methods())
        raise InvalidError(f"unknown placement method {method!r}: use one of {names}")
    if method == "shp" and ratio > 0.0:
        raise InvalidError("this method makes no replicas: use ratio 0, or another method")
    with ray_cluster(address) as ray:
        held = log if isinstance(log, RayQueryLog) else _DriverLog(ray, log.native)
        job = _Job(ray, held, options, progress)
        if method not in ("shp", "maxembed"):
            return _built_whole(job, misses, ratio)
        homes = job.homes(parts or PARTS_PER_CPU * max(1, int(ray.cluster_resources()["CPU"])))
        if method == "shp":
            return Placement(_native.bisection_end(*homes))
        return Placement(job.with_replicas(homes, ratio))


@contextmanager
def ray_cluster(address: str) -> Iterator[Any]:
    """Connects to a cluster, or starts one here, and yields the module ``ray``.

    Args:
        address: As of :func:`place_on_ray`. A connection that there is already stays.

    Raises:
        UnsupportedError: Ray is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise UnsupportedError("ray is not installed: pip install 'tierbed[ray]'") from error
    is_ours = not ray.is_initialized()
    if is_ours and address == "local":
        ray.init(
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            log_to_driver=False,
        )
    elif is_ours:
        ray.init(address=address, log_to_driver=False)
    try:
        yield ray
    finally:
        if is_ours:
            ray.shutdown()


@dataclass
class _Job:
    """One build: hands out tasks and waits for them."""

    ray: Any
    log: _DriverLog | RayQueryLog
    options: PlaceOptions
    progress: Progress | None

    def remote(self, task: Callable[..., Any], **options: Any) -> Any:
        """The task as one that Ray does again when its worker dies."""
        return self.ray.remote(max_retries=RETRIES, **options)(task)

    def homes(self, part_count: int) -> tuple[list[bytes], int, int]:
        """Bisects; returns the orders of the parts, and what else makes a placement of them."""
        split, order = self.remote(_split, num_returns=2), self.remote(_order)
        root, page_count = self.log.begin(self.options)
        level_count = max(0, part_count - 1).bit_length()

        def below(part: Ref, pages: int, levels: int) -> Iterator[Ref]:
            if levels == 0 or pages < 2:
                yield order.remote(part, self.options)
                return
            left, right = split.remote(part, self.options)
            yield from below(left, pages // 2, levels - 1)
            yield from below(right, pages - pages // 2, levels - 1)

        orders = self.wait(list(below(root, page_count, level_count)))
        return orders, self.log.row_count, self.options.rows_per_page

    def with_replicas(self, homes: tuple[list[bytes], int, int], ratio: float) -> NativePlacement:
        """Adds replica pages by connectivity."""
        scores, pages = self.remote(_scores), self.remote(_pages)
        there = self.ray.put(homes)
        width = max(1, int(self.ray.cluster_resources()["CPU"]))
        log = self.log
        blocks = log.cut(width) if isinstance(log, _DriverLog) else log.blocks
        found = self.wait([scores.remote(there, block) for block in blocks])
        bases = _native.placement_bases(found, self.options.rows_per_page, ratio)
        packed = log.packed()
        step = max(1, -(-len(bases) // (PARTS_PER_CPU * width)))
        chunks = [bases[at : at + step] for at in range(0, len(bases), step)]
        made = self.wait([pages.remote(there, packed, chunk) for chunk in chunks])
        every = [page for chunk in made for page in chunk]
        return _native.placement_with_pages(_native.bisection_end(*homes), every, ratio)

    def wait(self, refs: list[Ref]) -> list[Any]:
        """Waits for all tasks and returns their results, in order."""
        left = refs
        while left and self.progress is not None:
            _, left = self.ray.wait(left, num_returns=1, timeout=60.0)
            self.progress(len(refs) - len(left), len(refs))
        results: list[Any] = self.ray.get(refs)
        return results


def _built_whole(job: _Job, misses: QueryLog | None, ratio: float) -> Placement:
    whole = job.remote(_whole)
    missed = None if misses is None else misses.native.pack()
    [built] = job.wait([whole.remote(job.log.packed(), missed, job.options, ratio)])
    return Placement(placement_of(built))
