"""Checkpoints of ranks that Ray Train starts: saved natively, told to Ray, found again by it.

Ray starts and restarts the workers, remembers which checkpoint was the last one, and removes old
ones. Rows go straight to the run's storage; Ray moves nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tierbed.dist.checkpoint import save_rows
from tierbed.dist.collection import ShardedEmbeddingBagCollection
from tierbed.dist.sequences import ShardedEmbeddingCollection
from tierbed.errors import InvalidError, UnsupportedError

if TYPE_CHECKING:
    from ray.train import Checkpoint

__all__ = ["ray_checkpoint", "ray_load"]

Collection = ShardedEmbeddingBagCollection | ShardedEmbeddingCollection


def ray_checkpoint(
    rows: Collection,
    name: str,
    extra: Mapping[str, Any] | None = None,
    *,
    metrics: Mapping[str, Any] | None = None,
) -> str:
    """Saves the rows into the storage of a run of Ray Train, and reports that to Ray.

    All workers call this together, as ``ray.train.report``. The checkpoint is one of ``rows.save``
    at ``<storage_path>/<run>/<name>``: a folder that all nodes see, or a bucket of S3.

    Args:
        rows: The collection.
        name: Of the checkpoint; a new one for each. What is there of a life before, and was not
            reported, is replaced.
        extra: As of ``rows.save``.
        metrics: As of ``ray.train.report``.

    Returns:
        Where the checkpoint is.

    Raises:
        InvalidError: A name that leads elsewhere, or one that is taken.
        UnsupportedError: A storage that is neither a folder nor S3, or an older Ray.
        TierbedError: Another rank failed; the message names it.
    """
    import ray.train

    mode = getattr(ray.train, "CheckpointUploadMode", None)
    if mode is None:
        raise UnsupportedError(
            f"ray {ray.__version__} moves every checkpoint; install ray>=2.52, or call rows.save "
            "and ray.train.report yourself"
        )
    if not name or "/" in name or name.startswith("."):
        raise InvalidError(f"{name!r} is no name of a checkpoint; use letters, digits and '-'")
    context = ray.train.get_context()
    storage = context.get_storage()
    found = ray.train.Checkpoint(
        storage.build_checkpoint_path_from_name(name), storage.storage_filesystem
    )
    address = _address(found)
    known = ray.train.get_checkpoint()
    if known is not None and known.path == found.path:
        raise InvalidError(
            f"the run has a checkpoint {name!r}; give each a name of its own", {"name": name}
        )
    bags = rows if isinstance(rows, ShardedEmbeddingBagCollection) else rows._bags
    # One that is there was saved before a worker was lost, and Ray never heard of it.
    save_rows(address, bags._held(), extra, replaces=True)
    ray.train.report(
        dict(metrics or {}),
        checkpoint=found if context.get_world_rank() == 0 else None,
        checkpoint_upload_mode=mode.NO_UPLOAD,
    )
    return address


def ray_load(rows: Collection) -> dict[str, Any] | None:
    """Loads what :func:`ray_checkpoint` reported last; all workers call this together.

    The workers may be more or fewer than those that saved.

    Args:
        rows: The collection, with new stores.

    Returns:
        None where there is no checkpoint yet; else its ``extra``, or an empty dictionary.

    Raises:
        InvalidError: Other tables, another optimizer or seed, or rows that were trained.
        UnsupportedError: A storage that is neither a folder nor S3.
        CorruptionError: A file is missing, or not as it was written.
    """
    import ray.train

    found = ray.train.get_checkpoint()
    if found is None:
        return None
    return rows.load(_address(found)) or {}


def _address(checkpoint: Checkpoint) -> str:
    assert checkpoint.filesystem is not None, "Ray finds one for each path"
    kind, path = str(checkpoint.filesystem.type_name), str(checkpoint.path)
    if kind == "local":
        return path
    if kind == "s3":
        return f"s3://{path}"
    raise UnsupportedError(
        f"rows cannot be saved to the storage of this run, which is {kind}; use a storage_path in "
        "a folder that all nodes see, or s3://",
        {"storage": kind, "path": path},
    )
