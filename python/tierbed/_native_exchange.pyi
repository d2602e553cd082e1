"""Stubs of the exchange between ranks, which ``_native`` has."""

from typing import Any, final

from typing_extensions import Self

from tierbed._native import FeaturePlan, NativeCodedTables, NativeStore
from tierbed._native_options import ExchangePlan

__all__ = [
    "NativeArrivals",
    "NativeExchange",
    "NativeExchangeBench",
    "NativeExchangePlan",
    "NativeHeap",
    "NativeIndex",
    "NativeRail",
    "distinct",
]

def distinct(ids: Any, ends: list[int], found: Any, numbers: Any) -> list[int]:
    """Writes the distinct ones of ``ids`` [E] i64 to ``found`` [E], in the order in which they
    first come, and to ``numbers`` [E] the place of each id there. Returns how many are new in
    each of the features, whose ids end at ``ends``."""

@final
class NativeIndex:
    """The open table of a rank that holds some of its rows, or its index."""

    def __new__(cls, store: NativeStore, table: int) -> Self: ...
    def grow(self, row_count: int) -> None:
        """Makes room for rows that another rank gives to ids."""

    def evict(self, now: int, block: tuple[int, int, int] | None) -> tuple[int, int, bytearray]:
        """Takes rows as :meth:`NativeStore.evict`, and returns the freed ones, i64. ``block`` is
        first block, ranks and rows of a block that start again here; None: all rows do."""

    def reset(self, rows: Any) -> None:
        """Gives ``rows`` [N] i64, which another rank freed, their initial values."""

    def entries(self, chunk_ids: int, visit: Any) -> None:
        """Calls ``visit(ids, rows, counts, seen)`` in hash order with bytes of i64, i64 (-1: it
        waits for one), f32 and i64."""

    def free_rows(self, chunk_rows: int, visit: Any) -> None:
        """Calls ``visit(rows)`` with bytes of i64; the last row is given first."""

    def begin_copy(self, next_row: int) -> None:
        """Begins to take over another index, which has given rows below ``next_row``."""

    def copy_entries(self, ids: Any, rows: Any, counts: Any, seen: Any) -> None:
        """Takes over ids, as :meth:`entries` gave them."""

    def copy_free(self, rows: Any) -> None:
        """Takes over free rows, as :meth:`free_rows` gave them."""

    def end_copy(self) -> None:
        """Ends what :meth:`begin_copy` began."""

@final
class NativeExchangePlan:
    """Who holds what of each table, and the largest batch of a rank."""

    def __new__(
        cls, plan: ExchangePlan, samples_max: int, indices_max: int, node_count: int
    ) -> Self: ...
    @property
    def output_dim(self) -> int: ...
    @property
    def region_bytes(self) -> int: ...
    def groups(self, rank: int) -> list[list[tuple[int, str]]]:
        """Table and pooling of each member of each group of ``rank``."""

@final
class NativeHeap:
    """Memory with a region for each rank."""

    @staticmethod
    def local(rank_count: int, region_bytes: int) -> NativeHeap:
        """For ranks that are threads of this process."""

    @staticmethod
    def create(rank_count: int, region_bytes: int, token: int) -> NativeHeap:
        """For ranks that are processes; they open it at ``path`` while this object lives."""

    @staticmethod
    def open(path: str, rank_count: int, token: int) -> NativeHeap: ...
    @property
    def path(self) -> str | None: ...

@final
class NativeArrivals:
    """An output on its way, part by part."""

    @property
    def step(self) -> int:
        """Number of the step, for its backward."""

    @property
    def address(self) -> int:
        """Address of the output's first number."""

    def samples(self, part: int) -> tuple[int, int]:
        """Returns the first sample of a part, and the one behind its last."""

    def wait(self, part: int) -> None:
        """Waits until a part is complete: its samples may be read then."""

@final
class NativeExchange:
    """One rank of an exchange over a store. All ranks make the same calls in the same order."""

    def __new__(
        cls, plan: NativeExchangePlan, heap: NativeHeap, rank: int, timeout_ms: int,
        groups: list[FeaturePlan],
    ) -> Self: ...
    def forward(
        self, store: NativeStore | NativeCodedTables, indices: Any, offsets: Any,
        weights: Any | None, wants_backward: bool, wants_weight_grads: bool,
    ) -> tuple[int, int, int]:
        """Looks up a batch of this rank's samples: step, address and samples of the output,
        ``[samples, output_dim]``, valid until the forward after the next.
        """

    def forward_parts(
        self, indices: Any, offsets: Any, weights: Any | None, wants_backward: bool,
        wants_weight_grads: bool, parts: int,
    ) -> NativeArrivals:
        """Begins a lookup that completes in parts; :meth:`serve` looks them up."""

    def serve(self, store: NativeStore | NativeCodedTables, is_training: bool) -> None:
        """Looks up, for all ranks, the parts of the lookup that was begun, one after the other."""

    def backward(
        self, store: NativeStore | NativeCodedTables, step: int, grad: Any, weight_grads: Any | None
    ) -> None: ...
    def announce(self, indices: Any, offsets: Any, weights: Any | None) -> None:
        """Tells the ranks of one node of a batch that is looked up later."""

    def announced(self) -> tuple[int, int]:
        """Returns how many batches are announced, and how many of them were brought."""

    def is_announced(self, at: int, indices: Any, offsets: Any, weights: Any | None) -> bool:
        """Returns whether a batch is announced batch number ``at``, from 0."""

    def bring(self, store: NativeStore, count: int) -> int:
        """Brings the rows of the next announced batches into memory; returns how many fit."""

    def keep_brought(self, store: NativeStore, fit: int, agreed: int) -> None:
        """Keeps the first ``agreed`` of the ``fit`` batches that were brought."""

    def push_planned(self, store: NativeStore) -> None:
        """Adds the rows of the batch that was announced last to the plan that the store makes."""

    def pass_planned(self, store: NativeStore) -> None:
        """Passes the batch that was announced last, the next one of the plan, without a step."""

    def pass_announced(self) -> None:
        """Forgets the batch that was announced last, of which another rank makes a plan."""

    def skip_announced(self, number: int) -> None:
        """Forgets announced batches up to ``number``, from 1; the next lookup is of that one."""

    def check_batch(self, indices: Any, offsets: Any, weights: Any | None) -> None:
        """Raises when a batch may not be looked up now; nothing is sent."""

    def fail(self, cause: str) -> None:
        """Breaks the exchange: the other ranks get an error."""

    def forget_announced(self, kept: int) -> None:
        """Forgets announced batches behind the first ``kept``."""

    def agree(self, number: int) -> tuple[int, int]:
        """Tells the ranks of the node a number; returns the smallest and the largest one."""

    def rail(self) -> NativeRail:
        """Returns this rank's messages to other nodes."""

    def set_timeout_ms(self, timeout_ms: int) -> None: ...
    def close(self) -> None: ...

@final
class NativeRail:
    """One rank's part in lookups of several nodes. All ranks make the same calls in the same order.

    Bytes are listed by node.
    """

    def find_announced(
        self, indices: Any, offsets: Any, weights: Any | None, wants_backward: bool,
        wants_weight_grads: bool, parts: int,
    ) -> tuple[int, int] | None:
        """Which announced batch this is, counted from 1, to the ranks of the node; 0 is none."""

    def look_up_announced(
        self, number: int, wants_backward: bool, wants_weight_grads: bool
    ) -> NativeArrivals:
        """Begins the lookup of an announced batch that all ranks agreed upon."""

    def ask(
        self, indices: Any, offsets: Any, weights: Any | None, wants_backward: bool,
        wants_weight_grads: bool, parts: int,
    ) -> list[int]:
        """Publishes a batch; returns the bytes of the questions."""

    def ask_ahead(self, indices: Any, offsets: Any, weights: Any | None) -> list[int]:
        """As :meth:`ask`, for a batch that is looked up later."""

    def write_questions(self, to: Any) -> None: ...
    def hear(self, from_: Any, lengths: list[int], /) -> NativeArrivals:
        """Takes the questions that came, for a lookup."""

    def hear_ahead(self, from_: Any, lengths: list[int], /) -> None:
        """Takes the questions that came, for a batch that is looked up later."""

    def answer_bytes(self, part: int) -> tuple[list[int], list[int]]:
        """Returns the bytes of the answers of a part: sent and received."""

    def answer(
        self, store: NativeStore | NativeCodedTables, part: int, to: Any, is_training: bool
    ) -> None:
        """Looks up a part: into outputs of the node, and answers to other nodes into ``to``."""

    def deliver(self, part: int, from_: Any, /) -> None:
        """Puts the answers that came where they belong."""

    def finish_lookup(self) -> None: ...
    def put_grads(self, step: int, grad: Any) -> tuple[list[int], list[int]]:
        """Begins a backward; returns the bytes of gradients: sent and received."""

    def write_grads(self, to: Any) -> None: ...
    def update(
        self, store: NativeStore | NativeCodedTables, from_: Any, /
    ) -> tuple[list[int], list[int]]:
        """Steps the rows; returns the bytes of gradients of weights: sent and received."""

    def write_weight_grads(self, to: Any) -> None: ...
    def finish_backward(self, from_: Any, grad: Any, weight_grads: Any | None, /) -> None: ...
    def lose(self, rank: int, cause: str) -> None:
        """Breaks the exchange because a rank of another node does not answer."""

    def fail(self, cause: str) -> None:
        """Breaks the exchange because of an error of this rank."""

    def is_broken(self) -> bool: ...

@final
class NativeExchangeBench:
    """One rank of the measured exchange, with rows as arrays in memory."""

    def __new__(
        cls, plan: NativeExchangePlan, heap: NativeHeap, rank: int, timeout_ms: int
    ) -> Self: ...
    def begin(self, indices: Any, offsets: Any) -> int:
        """Publishes a batch, for all calls that follow; returns the samples of all ranks."""

    def one_sided(self) -> int:
        """Looks up and writes to all ranks; returns the address of this rank's output."""

    def compute_only(self, local: Any) -> None:
        """Looks up into ``local`` ``[samples of all ranks, width]``; sends nothing."""

    def all_to_all_and_unpack(self, local: Any, out: Any) -> None:
        """Sends blocks of ``local`` over the shared memory; unpacks what came into ``out``."""

    def close(self) -> None: ...
