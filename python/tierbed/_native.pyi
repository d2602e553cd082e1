"""The native module: the engine, the readers and the server behind the Python package.

Tensors cross the border by DLPack: CPU, C-contiguous, of the dtype named below; anything else
is a ``ValueError`` naming the argument. Options are those of
:mod:`tierbed._native_options`, or dataclasses of the package. Every call releases the GIL.
Errors are those of :mod:`tierbed.errors`.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, final, type_check_only

from typing_extensions import Self

from tierbed._native_exchange import *
from tierbed._native_options import (
    GeneratorOptions,
    Hyper,
    LogPosition,
    NativeFollowing,
    ReaderOptions,
    RecordOptions,
    SnapshotOptions,
    StoreOptions,
    TableSchema,
    VocabularyPolicy,
)
from tierbed._native_shards import *
from tierbed._native_versions import *
from tierbed.config.words import PageSelection, PlaceMethod
from tierbed.ops.windows.device import WindowsOnDevice
from tierbed.placement.build import LogOptions, PlaceOptions
from tierbed.serve.models import Scorer
from tierbed.serve.server import ServeOptions

__all__ = [
    "CacheLog",
    "CriteoReader",
    "FeaturePlan",
    "GeneratedLog",
    "Generator",
    "NativeArrivals",
    "NativeCodec",
    "NativeCodedTables",
    "NativeExchange",
    "NativeExchangeBench",
    "NativeExchangePlan",
    "NativeFollowing",
    "NativeHeap",
    "NativeIndex",
    "NativeObjects",
    "NativePlacement",
    "NativeQueryLog",
    "NativeQueryLogBuilder",
    "NativeRail",
    "NativeResident",
    "NativeRouting",
    "NativeRowShards",
    "NativeServer",
    "NativeShardClient",
    "NativeShardMap",
    "NativeSnapshot",
    "NativeStore",
    "NativeTierBudget",
    "Vocabulary",
    "VocabularyBuilder",
    "apply_delta",
    "begin_publish",
    "bench_lookup",
    "bench_serve",
    "bench_worker",
    "bisection_begin",
    "bisection_end",
    "bisection_order",
    "bisection_split",
    "cache_policies",
    "channel_head",
    "check_python_store",
    "commits",
    "cpu_features",
    "distinct",
    "drop_checkpoint",
    "fill_offsets",
    "finish_publish",
    "import_tables",
    "kept_checkpoints",
    "list_versions",
    "pin_version",
    "placement_bases",
    "placement_methods",
    "placement_pages",
    "placement_scores",
    "placement_with_pages",
    "promote_channel",
    "prune_versions",
    "published_identity",
    "pull_versions",
    "push_version",
    "put_commit_in_force",
    "restore_checkpoint",
    "roll_back_channel",
    "table_bytes",
    "unpin_version",
    "version",
]

@type_check_only
class SupportsDLPack(Protocol):
    def __dlpack__(self) -> Any: ...

def version() -> str: ...
def cpu_features() -> str: ...
def table_bytes(table: TableSchema) -> int:
    """Bytes of all rows of a table, touched or not, with their optimizer state."""

def bench_worker() -> None:
    """Serves the commands of ``tierbed bench training``: lines of JSON on standard input, one
    answer each on standard output, until the input ends. See ``tierbed_bench::training``."""

def bench_lookup(command: str) -> str:
    """Carries out one command of ``tierbed bench lookup --log``: a JSON object, answered by one.
    See ``tierbed_bench::lookup``."""

def bench_serve(command: str) -> str:
    """Carries out one command of ``tierbed bench serve``: a JSON object, answered by one. See
    ``tierbed_bench::serve``."""

def check_python_store(make: Callable[[], Any], seed: int, step_count: int, keeps: bool) -> None:
    """Runs the waist's conformance kit against the bridges (``tierbed.backends.bridge``) that
    ``make`` returns; ``keeps``: a new one continues at the last commit of the one before."""

# ---------------------------------------------------------------- training store

def fill_offsets(lengths: SupportsDLPack, is_short: bool, out: SupportsDLPack) -> None:
    """Fills ``out`` [N+1] i64 with the bounds of bags of ``lengths`` [N], i32 or i64."""

def kept_checkpoints(path: str) -> list[tuple[int, str, int]]:
    """Number, name and bytes of each kept checkpoint of the store at ``path``."""

def drop_checkpoint(path: str, name: str) -> None:
    """Forgets a kept checkpoint of the store at ``path``, which must be closed."""

def restore_checkpoint(path: str, name: str) -> None:
    """Makes a kept checkpoint the last one of the store at ``path``, which must be closed."""

def commits(path: str) -> list[dict[str, Any]]:
    """Checks every commit and kept checkpoint of the store at ``path``, which must be closed.

    Of each: ``number``, ``last_number`` (with a step in its log), ``name``, ``is_in_force``,
    ``is_kept``, ``damage`` (why it cannot be put in force, or None), ``tables`` (``name``,
    ``row_count``, ``steps``), ``attachments`` and ``pages`` checked."""

def put_commit_in_force(path: str, number: int) -> dict[str, Any]:
    """Puts a commit of the store at ``path`` in force, after checking it; returns it as above."""

def apply_delta(base: str, delta: str, out: str, dram_budget_bytes: int) -> dict[str, Any]:
    """Writes the snapshot that ``delta`` makes of ``base`` to ``out``; returns a report."""

def cache_policies() -> list[str]:
    """Names of the eviction policies of row tiers."""

_Counts = tuple[int, int, int, int]
_Told = Callable[[int, int], None] | None

@final
class CacheLog:
    """A query log in memory, for replays; rows are numbered in the order of appearance."""

    def __new__(cls, path: str, query_count_max: int | None) -> Self: ...
    @staticmethod
    def of(log: NativeQueryLog, table_rows: list[int]) -> CacheLog:
        """Copies the queries of a log that is in memory.

        Its rows are those of tables of ``table_rows``, one after the other.
        """
    def sizes(self) -> tuple[int, int, int]:
        """Queries, rows asked for, distinct rows."""
    def replay(self, policy: str, capacity_rows: int, first: int, threshold: int) -> _Counts:
        """Queries, perfect hits, rows and hits from query ``first`` on; starts empty.

        ``threshold`` is that of the admission bitmap; 0 admits always.
        """
    def replay_each(
        self, caches: list[tuple[str, int]], first: int, threads: int, progress: _Told
    ) -> list[_Counts]:
        """The same of caches of a policy and so many rows; ``progress`` hears of queries."""
    def replay_farthest(self, capacity_rows: int) -> _Counts:
        """The same with the eviction of the row needed last."""
    def perfect_bounds(self, capacity_rows: int) -> tuple[int, int, int]:
        """Perfect hits of a greedy schedule, their bound, queries that ask for a new row."""
    def replay_ssd(self, options: str) -> str:
        """Sends the log to a simulated SSD; JSON as in ``tierbed_bench::ssd``."""
    @staticmethod
    def rows_within(policy: str, row_bytes: int, row_count: int, capacity_bytes: int) -> int:
        """Rows of ``row_bytes``, of ``row_count`` there are, that a tier of ``capacity_bytes``
        holds, metadata included."""
    @staticmethod
    def policy_bytes(policy: str) -> int:
        """Bytes a policy keeps per cached row."""

@final
class GeneratedLog:
    """Generated samples as a log of queries, made anew in each pass of replays."""

    def __new__(
        cls, options: GeneratorOptions, sample_count: int, threads: int, progress: _Told
    ) -> Self:
        """Makes them once, to number their rows."""
    def sizes(self) -> tuple[int, int, int]:
        """As of `CacheLog`."""
    def replay_each(
        self, caches: list[tuple[str, int]], first: int, threads: int, progress: _Told
    ) -> list[_Counts]:
        """As of `CacheLog`."""

def import_tables(
    tables: list[tuple[str, SupportsDLPack]], placements: list[tuple[list[int], str]],
    codecs: list[tuple[int, str]], heads: list[tuple[int, str]], out: str, dram_budget_bytes: int,
) -> dict[str, Any]:
    """Writes a snapshot of matrices [rows, dim] f32 to ``out``; returns a report. For
    ``placements``, ``codecs`` and ``heads`` see :meth:`NativeStore.publish`."""

@final
class FeaturePlan:
    """Which table, pooling and output columns each feature has. Made by ``NativeStore.plan``."""

    @property
    def feature_count(self) -> int: ...
    @property
    def output_dim(self) -> int: ...

@final
class NativeStore:
    """The engine over one store. One per folder and machine; thread-safe, one call at a time."""

    def __new__(
        cls, path: str | None, options: StoreOptions, windows: WindowsOnDevice | None = None
    ) -> Self:
        """``path`` may be None for the backend ``"memory"``; ``windows`` trains rows of windows."""

    @staticmethod
    def over(bridge: Any, dram_budget_bytes: int) -> NativeStore:
        """The engine over a store of the caller's behind a ``tierbed.backends.bridge.Bridge``."""

    def add_table(self, table: TableSchema) -> int:
        """Returns the table id. Idempotent."""

    def add_open_table(self, table: TableSchema, policy: VocabularyPolicy) -> int:
        """Adds or finds a table of open vocabulary; its ``row_count`` is ignored."""

    def translate(
        self, plan: FeaturePlan, indices: SupportsDLPack, offsets: SupportsDLPack,
        now: int | None, out: SupportsDLPack,
    ) -> None:
        """Writes the row of every id to ``out`` [E] i64. ``now`` (in the unit of ``ttl``): a step
        of training, which counts ids and gives rows; None only finds."""

    def translate_ids(self, table: int, ids: SupportsDLPack, now: int | None) -> None:
        """Replaces ``ids`` [N] i64 of one table by their rows."""

    def evict(self, table: int, now: int) -> tuple[int, int]:
        """Takes the rows of ids the policy judges; returns ids with a row, and without."""

    def vocabularies(self) -> dict[str, Any]:
        """``{"tables": [{"table", "policy", "next_row", "free_count", "id_count",
        "waiting_count"}, ...], "pages_asked", "pages_read"}``."""

    def schema(self) -> dict[str, Any]:
        """``{"tables": [table, ...]}`` as given to :meth:`add_table`, in id order."""

    def set_optimizer(self, table: int, hyper: Hyper) -> None:
        """Holds from the next step on."""

    def plan(self, tables: list[int], poolings: list[str]) -> FeaturePlan:
        """One entry per feature: table id, and "sum" | "mean" | "none" (all or no feature "none";
        "none" needs equal dims)."""

    def lookup(
        self, plan: FeaturePlan, indices: SupportsDLPack, offsets: SupportsDLPack,
        weights: SupportsDLPack | None, out: SupportsDLPack, is_training: bool = False,
    ) -> int | None:
        """Pools the rows of a batch. ``indices`` [E] i64, ``offsets`` [F*B+1] i64 (feature-major,
        TorchRec's layout), ``weights`` [E] f32, ``out`` [B, output_dim] f32, or [E, D] for "none";
        overwritten. ``out`` may not share memory with an input. With ``is_training`` a step
        follows: a batch that is not the planned one is refused, or leaves the plan. Returns the
        token for the step's :meth:`update`, where there is a plan."""

    def update(
        self, plan: FeaturePlan, indices: SupportsDLPack, offsets: SupportsDLPack,
        weights: SupportsDLPack | None, grad: SupportsDLPack,
        weights_grad: SupportsDLPack | None, found: int | None = None,
        ticket: int | None = None,
    ) -> tuple[int, int] | None:
        """Applies one fused optimizer step: gradients of duplicate rows are summed once, in index
        order. ``grad`` like ``out`` of :meth:`lookup`; ``weights_grad`` [E] f32 receives the
        gradient of ``weights``, from the rows before the step. With ``found``, the token of the
        batch's lookup, ids are not checked again; ``ticket`` is that of :meth:`reserve_update`.
        Returns the :meth:`position` then."""

    def lookup_on_device(
        self, plan: FeaturePlan, indices: SupportsDLPack, offsets: SupportsDLPack,
        entries: SupportsDLPack,
    ) -> int | None:
        """Has the window of a batch on the device, and writes to ``entries`` [E] i32 which entry of
        its table each id is. Returns the token for :meth:`step_on_device`; None for a batch that is
        not the next one of a plan."""

    def step_on_device(
        self, plan: FeaturePlan, indices: SupportsDLPack, offsets: SupportsDLPack, found: int,
    ) -> tuple[tuple[int, int] | None, list[tuple[float, float, float]]]:
        """Counts the step of a batch, whose rows the caller steps on the device. Returns the
        :meth:`position` then, and learning rate, eps and weight decay of each feature."""

    def reserve_update(self) -> int:
        """Takes the next place in the order of calls for an :meth:`update` that another thread
        makes, and returns its ticket. Later calls wait until :meth:`end_update`."""

    def end_update(self, ticket: int, failure: BaseException | None = None) -> None:
        """Tells that the reserved update was made, or why not: the next call raises that."""

    def prefetch(
        self, plan: FeaturePlan, batches: list[tuple[SupportsDLPack, SupportsDLPack]]
    ) -> int:
        """Brings the rows of the next batches (indices, offsets), nearest first, into the row
        buffer in one sorted sweep and keeps them there until used. Returns how many of the
        batches fit."""

    def end_lookahead(self) -> None:
        """Forgets what was announced by :meth:`prefetch`; rows stay, unprotected."""

    def follow(self, plan: FeaturePlan, source: str, window_batches_max: int) -> dict[str, Any]:
        """Follows the plan made of ``source`` if there is one. Returns {"answer":
        "following", "epoch", "batch", "batch_count"} | {"answer": "plan_needed"} | {"answer":
        "refused", "reason"}."""

    def start_plan(self, plan: FeaturePlan, source: str, window_batches_max: int) -> None:
        """Starts making the plan of ``source`` in the store's folder."""

    def push_planned(
        self,
        plan: FeaturePlan,
        indices: SupportsDLPack,
        offsets: SupportsDLPack,
        is_stepped: bool = True,
    ) -> None:
        """Adds the next batch to the plan; one that is not stepped gives no rows to new ids."""

    def finish_plan(self) -> None:
        """Finishes the plan; it is durable then."""

    def position(self) -> tuple[int, int] | None:
        """Epochs done, and batches done of the next; None when no plan is followed."""

    def pass_planned(
        self, plan: FeaturePlan, indices: SupportsDLPack, offsets: SupportsDLPack
    ) -> tuple[int, int] | None:
        """Passes the next batch of the plan without a step; returns the :meth:`position` then."""

    def expect_joined(
        self, plan: FeaturePlan, indices: SupportsDLPack, offsets: SupportsDLPack
    ) -> bool:
        """Makes sure that this is the next batch of the plan, a bag for each feature of several
        collections, whose lookups and steps follow. Another batch moves the rows, if they may:
        False then."""

    def end_joined(self) -> bool:
        """Ends the batch of :meth:`expect_joined` if a part of it was stepped; False if none."""

    def pass_planned_to(self, batch: int) -> None:
        """Passes the batches of the plan up to ``batch``, of this epoch or of the next one."""

    def note_reason(self, reason: str) -> None:
        """Keeps why no plan is followed, for the statistics."""

    def read_rows(
        self, table: int, first_row: int, weights: SupportsDLPack, state: SupportsDLPack | None,
    ) -> None:
        """Copies rows ``first_row..`` into ``weights`` [N, D] f32 and their optimizer state into
        ``state`` [N, S] f32. Rows never written have their initial values."""

    def scan_rows(self, chunk_rows: int, visit: Callable[[int, Any, Any], None]) -> None:
        """Calls ``visit(table, rows, records)`` for all rows ever written, at most ``chunk_rows``
        at a time: capsules of ``rows`` [N] i64 and ``records`` [N, D + S + 1] f32 (weights, state,
        use count), whose memory is that of their tensors from then on."""

    def scan_ids(
        self, table: int, chunk_ids: int, visit: Callable[[int, Any, Any], None]
    ) -> None:
        """Calls ``visit(table, rows, ids)`` for all ids of a table of open vocabulary that have a
        row, at most ``chunk_ids`` at a time, in no order: capsules of ``rows`` [N] and ``ids``
        [N, 1] i64, as of :meth:`scan_rows`."""

    def gather_rows(self, table: int, rows: SupportsDLPack, weights: SupportsDLPack) -> None:
        """Copies rows ``rows`` [N] i64 (any order, duplicates allowed) into ``weights`` [N, D]
        f32."""

    def write_rows(
        self, table: int, first_row: int, weights: SupportsDLPack, state: SupportsDLPack | None,
        use_counts: SupportsDLPack | None = None,
    ) -> None:
        """Overwrites rows ``first_row..``; without ``state`` the optimizer state starts anew, as
        do use counts."""

    def steps_done(self, table: int) -> int:
        """Returns how many steps the table's optimizer did."""

    def set_steps_done(self, table: int, steps: int) -> None:
        """Lets the table's optimizer have done ``steps`` steps."""

    def use_counts(self, table: int, first_row: int, out: SupportsDLPack) -> None:
        """Copies how many update steps touched each row into ``out`` [N] i64."""

    def checkpoint(
        self, name: str, attachments: list[tuple[str, bytes]], keep: bool = False
    ) -> int:
        """Makes rows, optimizer state, step counters and attachments durable, all or nothing.
        Returns the checkpoint's number. With ``keep`` it outlives the next ones."""

    def drop_checkpoint(self, name: str) -> None:
        """Forgets a kept checkpoint and gives its disk space back."""
    def last_checkpoint(self) -> tuple[int, str] | None: ...
    def attachment_names(self) -> list[str]: ...
    def attachment(self, name: str) -> bytes | None:
        """Reads an attachment of the last checkpoint."""

    def publish(
        self, path: str, attachments: list[tuple[str, bytes]], progress: _Told,
        base: list[str] | None = None, changes: str = "auto",
        placements: list[tuple[list[int], str]] = ..., codecs: list[tuple[int, str]] = ...,
        heads: list[tuple[int, str]] = ..., shards: PublishedShards | None = ...,
    ) -> dict[str, Any]:
        """As :meth:`tierbed.Store.publish`; returns a report. ``base`` is the path of a snapshot
        and those of deltas upon it. ``placements`` are ids of tables and the file of their
        placement, ``codecs`` ids of tables and the codec of each: other tables are f32.
        ``heads`` are ids of tables with a tail, and rows of the head or ``%`` of those stored."""

    def verify(self) -> int:
        """Checks every checksum; returns the number of pages checked."""

    def stats(self) -> dict[str, Any]:
        """{"store": {...}, "buffer": {...}, "budget": {"limit_bytes", "used_bytes", "peak_bytes",
        "parts": {name: {"used_bytes", "peak_bytes"}}}, "steps": int, "disk_bytes": int, ...}"""

    def close(self) -> None:
        """Gives back memory and the folder's lock; what was not checkpointed is lost."""

# ---------------------------------------------------------------- serving snapshot

@final
class NativeTierBudget:
    """Bytes that the cached rows of several snapshots share."""

    def __new__(cls, limit_bytes: int, epoch_groups: int | None) -> Self: ...
    def stats(self) -> dict[str, Any]: ...

@final
class NativeSnapshot:
    """A published snapshot, read through a byte-budgeted row cache. Read-only, thread-safe."""

    def __new__(
        cls, path: str, options: SnapshotOptions, resident: list[NativeResident],
        tier_budget: NativeTierBudget | None,
    ) -> Self: ...
    def identity(self) -> str: ...
    def schema(self) -> dict[str, Any]:
        """``tables``, as given to :meth:`NativeStore.add_table`, in id order."""

    def plan(self, tables: list[int], poolings: list[str]) -> FeaturePlan: ...
    def lookup(
        self, plan: FeaturePlan, indices: SupportsDLPack, offsets: SupportsDLPack,
        weights: SupportsDLPack | None, out: SupportsDLPack,
    ) -> None: ...
    def translate(
        self, plan: FeaturePlan, indices: SupportsDLPack, offsets: SupportsDLPack,
        now: int | None, out: SupportsDLPack,
    ) -> None:
        """As that of :class:`NativeStore`; only finds."""

    def attachment(self, name: str) -> bytes | None: ...
    def attachment_names(self) -> list[str]: ...
    def write_neighbours(self, path: str | None, tables: Sequence[tuple[int, Any]]) -> str:
        """Writes what stands for rows of tables, ``[row_count, 2]`` i64: table and row, or -1s."""

    def verify(self) -> int: ...
    def record(self, options: RecordOptions) -> None: ...
    def stats(self) -> dict[str, Any]: ...
    def close(self) -> None: ...

@final
class NativeServer:
    """HTTP in front of a snapshot: ``/v1``, ``/v2``, ``/health``, ``/metrics``."""

    def __new__(
        cls, snapshot: NativeSnapshot, address: str, model: Scorer | None, options: ServeOptions
    ) -> Self:
        """``model.score`` gets capsules of DLPack, ``successor`` makes that of a delta's model."""

    @staticmethod
    def default_limits() -> dict[str, int]: ...
    @property
    def address(self) -> str: ...
    @property
    def grpc_address(self) -> str | None: ...
    @property
    def admin_address(self) -> str | None: ...
    def wait(self, timeout_s: float) -> bool: ...
    def apply(self, folder: str) -> dict[str, Any]: ...
    def drain(self) -> None: ...
    def reload(self) -> None: ...
    def stop(self) -> bool: ...


# ---------------------------------------------------------------- data

# Dense [B, N] f32, label [B] f32, values [F*B] i64 feature-major, offsets [F*B+1] i64.
_BatchParts = tuple[bytearray, bytearray, bytearray, bytearray]

@final
class Vocabulary:
    """A vocabulary file, opened and checked. Thread-safe."""

    def __new__(cls, path: str, resident_budget_bytes: int) -> Self: ...
    @property
    def feature_names(self) -> list[str]: ...
    @property
    def row_counts(self) -> list[int]: ...
    @property
    def sample_count(self) -> int: ...
    @property
    def min_count(self) -> int: ...
    @property
    def resident_bytes(self) -> int: ...
    def look_up(self, feature: int, tokens: list[bytes]) -> bytearray:
        """Ids [E] i64 of tokens of one feature; 0 for empty and unknown ones."""

@final
class VocabularyBuilder:
    """Counts tokens within a budget, then writes a vocabulary file."""

    def __new__(
        cls, feature_names: list[str], memory_budget_bytes: int, scratch_folder: str,
        min_count: int,
    ) -> Self: ...
    def add_column(self, feature: int, tokens: list[bytes]) -> None: ...
    def note_samples(self, sample_count: int) -> None: ...
    def finish(self, path: str) -> dict[str, Any]:
        """Writes the file; returns ``features``, ``run_count`` and ``file_bytes``, of each feature
        ``name``, ``token_count``, ``rare_token_count``, ``missing_count``. The builder is used
        up."""

@final
class CriteoReader:
    """A list of logs read as one stream of samples."""

    def __new__(cls, paths: list[str], options: ReaderOptions) -> Self: ...
    def feature_names(self) -> list[str]: ...
    @property
    def dense_count(self) -> int: ...
    def next_batch(self, vocabulary: Vocabulary, sample_count_max: int) -> _BatchParts | None:
        """Fewer samples only at the end of the log, then None."""

    def count_tokens(self, builder: VocabularyBuilder, sample_count_max: int) -> int:
        """Returns how many samples were counted; 0 at the end."""

    def skip(self, sample_count_max: int) -> int:
        """Passes over samples; returns how many there were."""

    def position(self) -> LogPosition: ...
    def seek(self, position: LogPosition) -> None: ...
    def progress(self) -> tuple[int, int]:
        """Bytes read and bytes of all files, as they lie on disk."""

@final
class Generator:
    """The seeded generator of Criteo-shaped samples. Thread-safe."""

    def __new__(cls, options: GeneratorOptions) -> Self: ...
    @staticmethod
    def scale_for_rows(row_count: int) -> float: ...
    def row_counts(self) -> list[int]: ...
    def fill(self, first_sample: int, sample_count: int) -> _BatchParts: ...
    def write_criteo(
        self, path: str, samples: tuple[int, int], packing: str, progress: _Told
    ) -> None:
        """``packing``: "plain", "gzip" or "zstd"."""

@final
class NativeResident:
    """What of a table is in memory as long as a snapshot is open."""

    def __new__(
        cls, table: int, row_count: int,
        head: tuple[NativeCodec, SupportsDLPack, SupportsDLPack] | None,
        tail: tuple[NativeCodec, SupportsDLPack] | None, default_row: SupportsDLPack | None,
    ) -> Self:
        """``head``: codec, rows ``[H]`` i64 ascending, codes ``[H, code_bytes]`` u8; ``tail``:
        codec and codes of every row; ``default_row`` ``[dim]`` f32."""

@final
class NativeCodec:
    """A codec for rows of one dim."""

    def __new__(
        cls, name: str, dim: int, codebooks: SupportsDLPack | None, part_count: int
    ) -> Self:
        """The codec ``name``, or a product codec of ``codebooks`` ``[part_count, 256, dim /
        part_count]``."""

    def code_bytes(self) -> int: ...
    def encode(self, rows: SupportsDLPack, codes: SupportsDLPack) -> None:
        """Encodes ``rows`` ``[N, dim]`` f32 into ``codes`` ``[N, code_bytes]`` u8."""

    def decode(
        self, codes: SupportsDLPack, indices: SupportsDLPack, out: SupportsDLPack, rounds: int
    ) -> None:
        """Decodes codes ``indices`` ``[E]`` i64 into ``out`` ``[E, dim]`` f32, ``rounds`` times."""

# ---------------------------------------------------------------- query logs and placements

def placement_methods() -> list[tuple[PlaceMethod, bool]]:
    """Names of the placement methods, the simplest first, and whether each makes replicas."""

@final
class NativeQueryLog:
    """A query log in memory."""

    @staticmethod
    def read(
        path: str, log_format: str, options: LogOptions, progress: _Told
    ) -> NativeQueryLog:
        """``log_format``: text, maxembed-text or maxembed; ``progress`` hears bytes."""
    def pack(self) -> bytes:
        """MaxEmbed's binary log, for other processes."""
    @staticmethod
    def unpack(packed: bytes) -> NativeQueryLog: ...
    @property
    def row_count(self) -> int: ...
    @property
    def query_count(self) -> int: ...
    @property
    def pin_count(self) -> int: ...
    def query(self, at: int) -> list[int] | None: ...
    def split(self, share: float) -> tuple[NativeQueryLog, NativeQueryLog]: ...
    def sample(self, query_count: int, seed: int) -> NativeQueryLog: ...
    def shuffled(self, seed: int) -> NativeQueryLog: ...
    def write(self, path: str) -> None:
        """Writes MaxEmbed's binary log."""
    def misses(
        self, earlier: NativeQueryLog, share: float, policy: str, batch_queries: int
    ) -> tuple[NativeQueryLog, int, float]:
        """What misses a row cache warmed by ``earlier``, the queries it is of, and the hit
        ratio."""

@final
class NativeQueryLogBuilder:
    """Collects the queries of readers written in Python."""

    def __new__(cls, row_count: int) -> Self: ...
    def push(self, values: SupportsDLPack, offsets: SupportsDLPack) -> None:
        """Adds the queries ``values[offsets[q] : offsets[q + 1]]``; both i64."""
    def finish(self) -> NativeQueryLog: ...

@final
class NativePlacement:
    """Rows on pages, and the pages of each row in the order in which they are tried."""

    @staticmethod
    def build(
        log: NativeQueryLog, misses: NativeQueryLog | None, options: PlaceOptions,
        ratios: list[float], homes: NativePlacement | None, kept: str | None, progress: _Told,
    ) -> list[NativePlacement]: ...
    @staticmethod
    def read(path: str) -> NativePlacement: ...
    @staticmethod
    def read_mapping(path: str, rows_per_page: int) -> NativePlacement: ...
    def write(self, path: str) -> None: ...
    def write_mapping(self, path: str) -> None: ...
    def ordered_by_use(self, log: NativeQueryLog) -> NativePlacement: ...
    def page(self, at: int) -> list[int] | None: ...
    def pages_of(self, row: int) -> list[int]: ...
    def info(self) -> dict[str, Any]:
        """The fields of :class:`tierbed.placement.PlacementInfo`."""
    def page_reads(
        self, log: NativeQueryLog, select: PageSelection, index_limit: int | None, threads: int
    ) -> dict[str, Any]:
        """The fields of :class:`tierbed.placement.PageReads`."""
    def connectivity_sum(self, log: NativeQueryLog) -> int: ...

def bisection_begin(log: NativeQueryLog, options: PlaceOptions) -> tuple[bytes, int]:
    """The part of a bisection above all others, and the pages it will become."""

def bisection_split(part: bytes, options: PlaceOptions) -> tuple[bytes, bytes]: ...
def bisection_order(part: bytes, options: PlaceOptions) -> bytes:
    """The rows of a part, page after page, u32."""

def bisection_end(orders: list[bytes], row_count: int, rows_per_page: int) -> NativePlacement: ...
def placement_scores(homes: NativePlacement, log: NativeQueryLog) -> bytes:
    """Connectivity of every row in a part of the log, u64."""

def placement_bases(scores: list[bytes], rows_per_page: int, ratio: float) -> list[int]:
    """The rows that replica pages are made for, by the scores of all parts of the log."""

def placement_pages(
    homes: NativePlacement, log: NativeQueryLog, bases: list[int]
) -> list[list[int]]: ...
def placement_with_pages(
    homes: NativePlacement, pages: list[list[int]], ratio: float
) -> NativePlacement: ...

@final
class NativeCodedTables:
    """Tables kept in memory in fewer bytes a row; they do not train."""

    def __new__(cls) -> Self: ...
    def add_table(
        self, table: TableSchema, codec: str, first_row: int, end_row: int
    ) -> int:
        """Adds rows ``first_row`` to ``end_row`` of a table, or finds the same again."""

    def schema(self) -> dict[str, Any]: ...
    def kept_as(self, table: int) -> tuple[str, int, int, int]:
        """Codec, first row, the row behind the last one, and bytes that rows take."""

    def plan(self, tables: list[int], poolings: list[str]) -> FeaturePlan: ...
    def lookup(
        self, plan: FeaturePlan, indices: Any, offsets: Any, weights: Any | None, out: Any,
        is_training: bool = False,
    ) -> None: ...
    def update(
        self, plan: FeaturePlan, indices: Any, offsets: Any, weights: Any | None, grad: Any,
        weights_grad: Any | None, found: int | None = None,
    ) -> None:
        """Refuses."""

    def read_rows(self, table: int, first_row: int, out: Any) -> None:
        """Decodes rows to ``out`` ``[N, dim]`` f32."""

    def write_rows(self, table: int, first_row: int, rows: Any) -> None: ...
    def read_codes(self, table: int, first_row: int, row_count: int, out: Any) -> None:
        """Copies codes to ``out`` ``[row_count, code_bytes]`` u8."""

    def write_codes(self, table: int, first_row: int, codes: Any) -> None: ...

