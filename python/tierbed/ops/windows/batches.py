"""Lookups and steps of batches whose rows are on a device.

The engine goes through its plan and says which entry of the window each id is. What pools and steps
by entries are the kernels of :mod:`tierbed.dist.kernels`, with the bits of the engine. The host
waits for nothing: ids go up from pinned memory, and a step is launched behind its backward.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tierbed.dist.joined import RankBatch
from tierbed.ops.windows.device import WindowsOnDevice
from tierbed.ops.windows.launches import (
    OPTIMIZERS,
    FeatureTables,
    Launch,
    Numbers,
    launches_of,
)

if TYPE_CHECKING:
    from tierbed._native import FeaturePlan, NativeStore
    from tierbed.ops.binding import Bags, Binding

__all__ = ["WindowBatches", "batches_of"]

# Lookups that may wait for their backward: the engine steps the last one.
KEPT_MAX = 2
# i64 words before the offsets of a batch: the address of the output, and the bounds of samples.
HEAD_WORDS = 3
# Bytes that gradients begin at a multiple of, to be loaded in whole vectors.
VECTOR_BYTES = 16


@dataclass(frozen=True)
class Found:
    """A batch that the engine found, on the device.

    Args:
        token: For its step.
        batch: Entries as ids, offsets and weights.
        out: Where its vectors go.
        head: i64: the address of ``out``, 0, and its rows.
    """

    token: int
    batch: RankBatch
    out: Tensor
    head: Tensor


class WindowBatches:
    """Batches of one collection, whose rows are in windows on a device.

    Args:
        windows: Where the rows are.
        native: The engine.
        plan: Features of a batch.
        of: What these features are.
    """

    def __init__(
        self,
        windows: WindowsOnDevice,
        native: NativeStore,
        plan: FeaturePlan,
        of: FeatureTables,
    ) -> None:
        self._windows = windows
        self._native = native
        self._plan = plan
        self._of = of
        self._numbers: list[Numbers] = [(0.0, 0.0, 0.0)] * len(of.tables)
        self._kept: dict[int, RankBatch] = {}

    def look_up(self, bags: Bags) -> tuple[Tensor, int] | None:
        """Looks up the next batch of the plan; None when ``bags`` are not that.

        Returns:
            The output on the device, and the token for :meth:`step`.
        """
        with self._windows.in_order():
            found = self._find(bags)
            if found is None:
                return None
            launches = self._launches_of(self._numbers)
            if sum(len(launch.features) for launch in launches) < len(self._of.tables):
                # Bags of tables that the window has no row of are empty.
                found.out.zero_()
            for launch in launches:
                launch.pool(found.batch, found.out, found.head)
        return found.out, found.token

    def step(
        self,
        grad: Tensor,
        bags: Bags,
        token: int | None,
        *,
        skips_nonfinite: bool,
        wants_weights_grad: bool,
    ) -> tuple[tuple[int, int] | None, Tensor | None] | None:
        """Steps the rows of a batch that was looked up; None when it was not, on the device.

        Args:
            grad: Gradient of the output, of its shape.
            bags: As they were looked up.
            token: That of the lookup; None where it was lost on the way.
            skips_nonfinite: Whether a gradient with nan or inf leaves the step out.
            wants_weights_grad: Whether to compute the gradient of weights.

        Returns:
            Epochs, and batches of the epoch done; and the gradient of the weights ``[E]``, on the
            device, where it is wanted.
        """
        if token is None or token not in self._kept:
            found = self._find(bags)
            if found is None:
                return None
            token = found.token
        batch = self._kept.pop(token)
        position, numbers = self._native.step_on_device(
            self._plan, bags.indices, bags.offsets, token
        )
        weights_grad = None
        if wants_weights_grad:
            weights_grad = torch.zeros(
                batch.indices.numel(), dtype=torch.float32, device=self._windows.device
            )
        try:
            with self._windows.in_order():
                self._step(batch, grad, numbers, skips_nonfinite, weights_grad)
        except BaseException as error:
            # The engine has counted a step that some rows lack.
            self._windows.fail(error)
            raise
        return position, weights_grad

    # ------------------------------------------------------------

    def _find(self, bags: Bags) -> Found | None:
        """Has the engine find a batch, and brings it to the device."""
        link, count = self._windows.link, bags.indices.numel()
        entries = link.numbers_to_fill(count, torch.int32)
        token = self._native.lookup_on_device(self._plan, bags.indices, bags.offsets, entries)
        if token is None:
            return None
        features = len(self._of.tables)
        samples = (bags.offsets.numel() - 1) // features
        rows = samples if self._of.is_pooled else count
        shape = (rows, self._of.output_dim)
        out = torch.empty(shape, dtype=torch.float32, device=self._windows.device)
        head = link.numbers_to_fill(HEAD_WORDS + bags.offsets.numel(), torch.int64)
        head[:HEAD_WORDS] = torch.tensor([out.data_ptr(), 0, rows], device="cpu")
        head[HEAD_WORDS:] = bags.offsets
        head = link.to_device(head)
        lengths = torch.diff(bags.offsets).view(features, samples)
        batch = RankBatch(
            samples,
            bags.offsets[::samples].tolist() if samples else [0] * (features + 1),
            link.to_device(entries),
            head[HEAD_WORDS:],
            None if bags.weights is None else link.to_device(bags.weights),
            lengths.amax(dim=1).tolist() if samples else [0] * features,
        )
        others = [other for other in self._kept if other != token][1 - KEPT_MAX :]
        self._kept = {**{other: self._kept[other] for other in others}, token: batch}
        return Found(token, batch, out, head[:HEAD_WORDS])

    def _step(
        self,
        batch: RankBatch,
        grad: Tensor,
        numbers: list[Numbers],
        skips_nonfinite: bool,
        weights_grad: Tensor | None,
    ) -> None:
        places = None
        if weights_grad is not None:
            places = torch.arange(weights_grad.numel(), device=weights_grad.device) * 4
            places += weights_grad.data_ptr()
        grad = grad.to(self._windows.device).contiguous()
        if grad.data_ptr() % VECTOR_BYTES:
            grad = grad.clone()
        is_allowed = self._allow(grad, skips_nonfinite)
        self._numbers = numbers
        for launch in self._launches_of(numbers):
            of_launch = numbers[launch.features[0]]
            last = launch.step(batch, grad, of_launch, places, is_allowed)
            if last is not None:
                self._windows.counts[:1] += last + 1

    def _allow(self, grad: Tensor, skips_nonfinite: bool) -> Tensor:
        """Returns whether rows are stepped, ``[1]`` bool on the device; counts it when not."""
        is_finite = torch.isfinite(grad).all().view(1)
        left_out, refused = self._windows.counts[1:2], self._windows.counts[2:3]
        is_allowed = is_finite & (refused == 0)
        (left_out if skips_nonfinite else refused).add_(~is_finite)
        return is_allowed

    def _launches_of(self, numbers: list[Numbers]) -> list[Launch]:
        """Returns the launches of the current window, of features that are stepped alike."""
        window, known = self._windows.window, self._windows.launches
        numbered: dict[Numbers, int] = {}
        alike = tuple(numbered.setdefault(of_feature, len(numbered)) for of_feature in numbers)
        key = (id(self), alike)
        if key not in known:
            known[key] = launches_of(self._of, numbers, window)
        launches: list[Launch] = known[key]
        return launches


def batches_of(binding: Binding) -> WindowBatches | None:
    """Returns what looks up the batches of ``binding`` on a device; None where kernels cannot."""
    store: NativeStore = binding.native  # type: ignore[assignment]
    tables = store.schema()["tables"]
    optimizers = [tables[table]["optimizer"] for table in binding.tables]
    assert binding.windows is not None, "lookups in windows that are nowhere"
    others = sorted(set(optimizers) - OPTIMIZERS.keys())
    if others:
        logging.getLogger("tierbed").warning(
            "rows stay on the host: kernels step by %s, not by %s", [*OPTIMIZERS], others
        )
        return None
    binding.windows.note_tables(tables)
    of = FeatureTables(binding.tables, binding.poolings, binding.dims, optimizers)
    return WindowBatches(binding.windows, store, binding.plan, of)
