"""The public names and signatures, frozen: a change here is a change users see."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import tierbed as tb

PUBLIC = [
    "Adagrad",
    "Adam",
    "CacheOptions",
    "CacheTier",
    "ClosedError",
    "CodedStore",
    "Constant",
    "CorruptionError",
    "CountBasedEvictionPolicy",
    "CountTimestampMixedEvictionPolicy",
    "DataType",
    "Embedding",
    "EmbeddingBag",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingConfig",
    "Follow",
    "FrequencyAdmissionStrategy",
    "HotRows",
    "InvalidError",
    "IoError",
    "IoOptions",
    "JaggedTensor",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "NeighbourTier",
    "Neighbours",
    "NoSpaceError",
    "Normal",
    "PartialRowWiseAdam",
    "Placement",
    "PoisonedError",
    "PoolingType",
    "Publisher",
    "QueryLog",
    "Route",
    "RowOptimizer",
    "RowWiseAdagrad",
    "SGD",
    "ShardClient",
    "ShardMap",
    "Shards",
    "Snapshot",
    "Store",
    "TierBudget",
    "TierPlan",
    "TierbedError",
    "TimestampBasedEvictionPolicy",
    "Uniform",
    "UnsupportedError",
    "Versions",
    "__version__",
    "compile_dense",
    "data",
    "errors",
    "find_neighbours",
    "lookahead",
    "nn",
    "place",
    "plan_tiers",
    "scalars",
]

PARAMETERS = {
    "CodedStore": "seed",
    "CodedStore.of": "store tables",
    "Store.open": "path dram_budget backend durability order on_mismatch io "
    "disk_quota checkpoint vocabulary_dram shards read_only device hbm_budget storage_thread "
    "seed",
    "Store.checkpoint": "self name extra keep capture_rng attachments",
    "Store.publish": "self path model base changes placement codec head_rows shards attachments "
    "compiled progress",
    "Publisher": "store model location channel delta_every full_every keep local checkpoint "
    "placement codec head_rows attachments compiled beside_training on_error",
    "Versions.pull": "self to channel version bandwidth progress",
    "Store.read_rows": "self table first_row row_count",
    "Store.gather_rows": "self table rows",
    "Store.write_rows": "self table first_row weights rows_state use_counts",
    "Store.steps_done": "self table",
    "Store.set_steps_done": "self table steps",
    "Store.set_learning_rate": "self lr tables",
    "Snapshot.open": "path dram_budget backend cache resident misses readers io device hot",
    "TierBudget": "limit epoch_groups",
    "Snapshot.lookup": "self features pooling tables",
    "EmbeddingBagConfig": "num_embeddings embedding_dim name feature_names data_type "
    "weight_init_max weight_init_min init seed admission_strategy virtual_table_eviction_policy "
    "pooling",
    "EmbeddingConfig": "num_embeddings embedding_dim name feature_names data_type "
    "weight_init_max weight_init_min init seed admission_strategy virtual_table_eviction_policy",
    "EmbeddingBagCollection": "tables store optimizer optimizer_kwargs is_weighted on_nonfinite "
    "device",
    "EmbeddingCollection": "tables store optimizer optimizer_kwargs on_nonfinite device",
    "EmbeddingBag": "num_embeddings embedding_dim store mode include_last_offset padding_idx "
    "name optimizer optimizer_kwargs config on_nonfinite device",
    "Embedding": "num_embeddings embedding_dim padding_idx store name optimizer optimizer_kwargs "
    "config on_nonfinite device",
    "Embedding.from_pretrained": "embeddings freeze store name rows options",
    "EmbeddingBag.forward": "self input offsets per_sample_weights",
    "KeyedJaggedTensor": "keys values weights lengths offsets stride",
    "JaggedTensor": "values lengths weights offsets",
    "KeyedTensor": "keys length_per_key values key_dim",
    "SGD": "lr weight_decay",
    "Adagrad": "lr weight_decay eps initial_accumulator_value",
    "RowWiseAdagrad": "lr weight_decay eps initial_accumulator_value",
    "Adam": "lr weight_decay betas eps",
    "PartialRowWiseAdam": "lr weight_decay betas eps",
    "place": "log misses rows_per_page method ratio homes seed threads iterations kept progress",
    "Placement.reads": "self log select index_limit threads",
    "QueryLog.misses": "self earlier share policy batch",
    "lookahead": "loader emb window key start epochs",
    "RowOptimizer": "rows dense",
    "nn.DLRM": "dense_count table_sizes store embedding_dim hidden optimizer",
    "nn.DeepFM": "dense_count table_sizes store embedding_dim hidden optimizer",
    "nn.PNN": "dense_count table_sizes store embedding_dim hidden optimizer",
}


def test_the_public_names_are_these() -> None:
    assert sorted(tb.__all__) == sorted(PUBLIC)
    for name in PUBLIC:
        assert getattr(tb, name) is not None


@pytest.mark.parametrize("path", PARAMETERS)
def test_signatures(path: str) -> None:
    thing: object = tb
    for part in path.split("."):
        thing = getattr(thing, part)
    assert list(inspect.signature(thing).parameters) == PARAMETERS[path].split()  # type: ignore[arg-type]


def test_every_public_thing_is_documented() -> None:
    for name in PUBLIC:
        thing = getattr(tb, name)
        if name != "__version__":
            assert inspect.getdoc(thing), f"{name} has no docstring"
        if inspect.isclass(thing):
            for method, value in vars(thing).items():
                if callable(value) and not method.startswith("_"):
                    assert inspect.getdoc(getattr(thing, method)), f"{name}.{method}"


def test_importing_stays_light() -> None:
    code = (
        "import sys, tierbed; heavy = {'matplotlib', 'pyarrow', 'rich', 'typer', 'safetensors',"
        "'torch._inductor'}; print(sorted(heavy & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
