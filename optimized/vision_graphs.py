"""A call of the vision tower with grids that come again, recorded once and replayed: a CUDA graph over fixed buffers.

A small image costs the host more than the GPU: some 400 launches, whatever its size. With the grids fixed, nothing
changes from call to call but the pixels, so a replay is one copy and one launch. Where there are no CUDA graphs, or
somebody listens to the probes, the same rows are computed without a graph.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence

import torch
from torch import Tensor

from optimized.errors import PlanError
from optimized.vision import VisionTower
from optimized.vision_plan import upload, vision_runs
from reference.layers.vision_grid import Grid, VisionInputError
from reference.probe import is_observed

# N patches  M output rows  X values of a patch  O output width


class RecordedVision:
    """`recorded(pixels_NX)` is `tower(pixels_NX, grids)`, in a tensor that the next call overwrites.

    Costs the memory of one call for as long as it lives: some 40 kB a patch when released. Weights may be replaced in
    place. Calls belong on one stream.
    Raises: PlanError for grids that take more than one run, or none.
    """

    def __init__(self, tower: VisionTower, grids: Sequence[Grid]):
        self._tower, self._grids = tower, tuple(grids)
        merge = tower.config.spatial_merge_size
        runs = vision_runs(grids, merge, tower.options.most_patches)
        if len(runs) != 1:
            raise PlanError(
                f"a recorded call is one run: expected 1 to {tower.options.most_patches} patches, found "
                f"{sum(run.patches for run in runs)} in {len(runs)} runs"
            )
        self._frames = upload(runs[0], merge, tower.device)
        width = tower.config.num_channels * tower.config.patch_size**2
        self._pixels_NX = torch.zeros(runs[0].patches, width, dtype=torch.float32, device=tower.device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._rows_MO: Tensor | None = None

    @torch.no_grad()
    def __call__(self, pixels_NX: Tensor) -> Tensor:
        """Rows of float32 pixels, on any device. Raises: VisionInputError for another number or width of patches."""
        if pixels_NX.shape != self._pixels_NX.shape:
            raise VisionInputError(
                f"pixels: expected {tuple(self._pixels_NX.shape)} as recorded, found {tuple(pixels_NX.shape)}"
            )
        if self._tower.device.type != "cuda" or is_observed():
            return self._tower(pixels_NX, self._grids)
        self._pixels_NX.copy_(pixels_NX, non_blocking=True)
        if self._graph is None or self._rows_MO is None:
            self._graph, self._rows_MO = self._recorded()
        self._graph.replay()
        return self._rows_MO

    def _recorded(self) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            # Compiles, and lets libraries make their workspaces.
            self._tower.rows(self._pixels_NX, self._frames)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # A collection inside of the capture could free graphs, which no capture allows.
        gc.collect()
        with torch.cuda.graph(graph, stream=side):
            rows_MO = self._tower.rows(self._pixels_NX, self._frames)
        return graph, rows_MO
