"""Shards of a divided model: what a gateway answers from, and a client that needs no gateway."""

from __future__ import annotations

import os
from dataclasses import KW_ONLY, dataclass
from types import TracebackType

import torch

from tierbed._native import NativeRouting, NativeShardClient
from tierbed._util.durations import parse_seconds
from tierbed.config.words import MissingShard, RowType, ServedPooling, check_word
from tierbed.errors import ClosedError
from tierbed.jagged import KeyedJaggedTensor, KeyedTensor
from tierbed.serve.shard_map import ShardMap

__all__ = ["Route", "ShardClient"]


@dataclass(frozen=True)
class Route:
    """The servers of a divided model's shards, for :class:`Server` and :class:`ShardClient`.

    Args:
        shards: The folder of ``shards.json``, as ``publish`` wrote it. Read again when it changes.
        members: The servers of each shard: a file in TOML or JSON, or ``dns:rows-{shard}:8001``.
        missing_shard: What is answered for rows of a shard of which no server answers.
        row_type: How rows come from shards; narrower ones are rounded.
        ca: Authorities of the shards' certificates, in PEM; None: connections are plain.
        certificate: The certificate that shards want of who asks, in PEM.
        key: The key of that certificate, in PEM.
        server_name: The name in the shards' certificates, where it is not that of their addresses.
        token: A file with the token that shards want.
        wait: Longest time at the start to wait for a server of every shard.

    Examples:
        >>> route = tb.Route("shards", "members.toml", missing_shard="default-rows")
        >>> route.row_type
        'f32'
    """

    shards: str | os.PathLike[str]
    members: str | os.PathLike[str]
    _: KW_ONLY
    missing_shard: MissingShard = "refuse"
    row_type: RowType = "f32"
    ca: str | os.PathLike[str] | None = None
    certificate: str | os.PathLike[str] | None = None
    key: str | os.PathLike[str] | None = None
    server_name: str | None = None
    token: str | os.PathLike[str] | None = None
    wait: float | str = "60s"

    def row_counts(self) -> dict[str, int]:
        """Returns the rows of each table, over all shards.

        Raises:
            InvalidError: No map lies there.
        """
        return {table.name: table.row_count for table in ShardMap.open(self.shards).tables}

    def begin(self) -> NativeRouting:
        """Finds the shards, and waits until every one has a server.

        Raises:
            InvalidError: Options, a map or members that do not fit.
            ClosedError: A shard of which no server answers in time.
        """
        check_word("missing_shard", self.missing_shard, MissingShard)
        check_word("row_type", self.row_type, RowType)

        def path(given: str | os.PathLike[str] | None) -> str | None:
            return None if given is None else os.fspath(given)

        return NativeRouting(
            {
                "route": os.fspath(self.shards),
                "members": os.fspath(self.members),
                "missing_shard": self.missing_shard,
                "row_type": self.row_type,
                "ca": path(self.ca),
                "certificate": path(self.certificate),
                "key": path(self.key),
                "server_name": self.server_name,
                "token": path(self.token),
                "wait_s": parse_seconds(self.wait, "wait"),
            }
        )


class ShardClient:
    r"""Lookups of a divided model, asked of its shards without a gateway. Also a context manager.

    It has the map, the servers, the generation rule and the bits of a gateway, in this process.

    Args:
        route: Where the shards are.

    Raises:
        InvalidError: Options, a map or members that do not fit.
        ClosedError: A shard of which no server answers in time.

    Examples:
        >>> from pathlib import Path
        >>> from tierbed.serve import ServeOptions, Server
        >>> tables = [tb.EmbeddingBagConfig(num_embeddings=100, embedding_dim=4, name="item")]
        >>> with tb.Store.open("store", dram_budget="16MiB") as store:
        ...     emb = tb.EmbeddingBagCollection(tables, store=store)
        ...     report = store.publish("shards", shards=tb.Shards(count=1))
        >>> [folder] = [shard.folder for shard in tb.ShardMap.open("shards").shards]
        >>> shard = tb.Snapshot.open(Path("shards") / folder, dram_budget="8MiB")
        >>> options = ServeOptions(grpc_address="127.0.0.1:0", log_level="off")
        >>> server = Server(shard, "127.0.0.1:0", with_model=False, options=options)
        >>> members = f'[[shard]]\nreplicas = ["{server.grpc_address}"]\n'
        >>> written = Path("members.toml").write_text(members)
        >>> with tb.ShardClient(tb.Route("shards", "members.toml")) as client:
        ...     client.features
        ['item']
        >>> server.stop()
        True
    """

    def __init__(self, route: Route) -> None:
        self._native: NativeShardClient | None = route.begin().client()
        self._generation = ""

    @property
    def features(self) -> list[str]:
        """The features that the shards serve."""
        return self._open().features

    @property
    def generation(self) -> str:
        """The generation of the last answer; empty before the first."""
        return self._generation

    def lookup(
        self, features: KeyedJaggedTensor, *, pooling: ServedPooling | None = None
    ) -> dict[str, torch.Tensor]:
        """Looks bags up, all of one generation.

        Args:
            features: Bags of some features; weights count where they are pooled.
            pooling: In place of what each feature was published with.

        Returns:
            For each feature ``[B, D]``, or ``[E, D]`` with pooling none.

        Raises:
            InvalidError: Unknown features, or ids out of range.
            ClosedError: No server of a shard answers; it may be asked again.
        """
        bags = []
        for name, own in features.to_dict().items():
            weights = own.weights_or_none()
            words = (own.values().to(torch.int64), own.lengths().to(torch.int64))
            values, lengths = (tensor.contiguous().numpy().tobytes() for tensor in words)
            bags.append(
                (
                    name,
                    values,
                    lengths,
                    None
                    if weights is None
                    else weights.to(torch.float32).contiguous().numpy().tobytes(),
                )
            )
        self._generation, outputs = self._open().lookup(bags, pooling)
        return {
            name: torch.frombuffer(bytearray(data), dtype=torch.float32).view(rows, dim)
            if data
            else torch.empty(rows, dim, device="cpu")
            for name, rows, dim, data in outputs
        }

    def pooled(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """As :meth:`lookup`, with the vectors of all features side by side.

        Args:
            features: Bags of some features.

        Returns:
            ``[B, sum of D]``.
        """
        found = self.lookup(features)
        names = features.keys()
        return KeyedTensor.from_tensor_list(names, [found[name] for name in names])

    def close(self) -> None:
        """Lets go of the connections."""
        self._native = None

    def __enter__(self) -> ShardClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _open(self) -> NativeShardClient:
        if self._native is None:
            raise ClosedError("the client is closed; make another one")
        return self._native
