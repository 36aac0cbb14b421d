# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Vision
#
# An image becomes patches, patches become rows that stand beside text embeddings. Most mistakes on that way leave all
# shapes right and the values plausible: rows in another order, axes exchanged, images that see each other. This
# notebook walks the way with a tiny tower, shows each of the orders that have to fit, and breaks some of them.
#
# At the end, the budget that decides how many frames of a video are looked at, and how closely.

# %%
from dataclasses import replace
from itertools import pairwise

import matplotlib.pyplot as plt
import numpy as np
import torch

from parity.faults.vision import VISION_FAULTS
from parity.runners.reference_vision import VisionReferenceRunner, run_case
from parity.schema_vision import VISION_PROBES, vision_pattern_of
from parity.vision_case import VisionCase
from parity.vision_compare import compare_vision_exact
from reference.checkpoint import synthetic_tensors
from reference.config import released
from reference.layers.vision_grid import coordinates, split_by_item
from reference.media.image import image_of_rows, preprocess_image
from reference.media.video_budget import frame_cap, solve
from reference.probe import Recorder, concatenated, listening
from reference.vision import tiny_with_vision

torch.set_num_threads(1)
# The tiny tower, with the patches that the image processor makes.
config = tiny_with_vision()
config = replace(config, vision=replace(config.vision, patch_size=14))
vision = config.vision
weights = dict(synthetic_tensors(config))
tower = VisionReferenceRunner(config, weights, torch.float32).tower

# %% [markdown]
# ## 1. An image becomes patches
#
# Any size is brought to multiples of 28 pixels, cut into patches of 14 by 14, and each patch is a row of 3 · 14 · 14
# values. Here a picture made of formulas, 150 by 200 pixels.

# %%
y, x = np.mgrid[0:150, 0:200]
disc = ((y - 70) ** 2 + (x - 110) ** 2 < 45**2)[..., None]
sky = np.stack((90 + 0.3 * y, 120 + 0.4 * y, 230 - 0.5 * x), axis=-1)
picture = np.where(disc, np.array([250.0, 200.0, 60.0]), sky).astype(np.uint8)

patches = preprocess_image(picture)
((frames, height, width),) = grids = [tuple(grid) for grid in patches.grids_N3.tolist()]
print(f"{picture.shape} pixels -> {height} x {width} patches -> rows {tuple(patches.pixels_PX.shape)}")
assert patches.pixels_PX.shape == (height * width, 3 * 14 * 14)
assert image_of_rows(patches.pixels_PX.numpy(), (1, height, width)).shape == (height * 14, width * 14, 3)

# %% [markdown]
# The rows are not in raster order. Four neighbours, a square of 2 by 2, come one after the other, because the merger
# will put them side by side into one row: top left, top right, bottom left, bottom right.

# %%
places = coordinates(height, width, vision.spatial_merge_size)
axes = plt.figure(figsize=(7, 5), layout="constrained").subplots()
axes.imshow(picture, extent=(-0.5, width - 0.5, height - 0.5, -0.5))
axes.plot(places[:, 1], places[:, 0], color="white", linewidth=0.8)
for row, (py, px) in enumerate(places.tolist()):
    axes.text(px, py, str(row), ha="center", va="center", fontsize=7)
axes.set(title="row of each patch", xlabel="column of patches", ylabel="row of patches")
plt.show()

assert places[:4].tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]

# %% [markdown]
# ## 2. The way of the rows
#
# Every intermediate has a name. Up to the merger there is a row for each patch, then one for each square, of the text
# model's width.

# %%
recorder = Recorder()
with listening(recorder):
    merged = tower(patches.pixels_PX, grids)
named = concatenated(recorder.observations)
for name in ("pixels", "patches", "blocks.0.attn.q", "blocks.5.output", "trunk", "merger.grouped", "merged"):
    print(f"vision.{name:18} {tuple(named[f'vision.{name}'].shape)}")
assert merged.shape == (height * width // 4, config.text.hidden_size)
assert patches.tokens == (len(merged),)
assert {vision_pattern_of(name) for name in named} == {probe.pattern for probe in VISION_PROBES}

# %% [markdown]
# ## 3. Where a patch is
#
# Position comes in by rotation alone: the first half of a head's angles is the patch's row times a frequency, the
# second half its column. Both axes have the same frequencies, and coordinates start at 0 in each frame.

# %%
angles = named["vision.rope.angles"]
pairs = angles.shape[1] // 2
figure = plt.figure(figsize=(8, 2.6), layout="constrained")
for axes, column, axis in zip(figure.subplots(1, 2), (0, pairs), ("row", "column"), strict=True):
    image = torch.zeros(height, width)
    image[places[:, 0], places[:, 1]] = angles[:, column]
    shown = axes.imshow(image)
    axes.set(title=f"first angle of the {axis}, rad")
figure.colorbar(shown)
plt.show()

assert torch.equal(angles[:, 0], places[:, 0].float())
assert torch.equal(angles[:, pairs], places[:, 1].float())

# %% [markdown]
# ## 4. Images do not see each other
#
# All images of a call are in one list of rows, but attention stays within a frame. So an image has the same bits alone,
# beside others, and in any order, which is the first thing to test in a port that packs images.

# %%
other = patches.pixels_PX.flip(0)[: 4 * 6]
together = tower(torch.cat((patches.pixels_PX, other)), [*grids, (1, 4, 6)])
first, second = split_by_item(together, [*grids, (1, 4, 6)], vision.spatial_merge_size)
assert torch.equal(first, merged)
assert torch.equal(second, tower(other, [(1, 4, 6)]))

reversed_order = tower(torch.cat((other, patches.pixels_PX)), [(1, 4, 6), *grids])
assert torch.equal(reversed_order[len(second) :], merged)

# %% [markdown]
# What one patch looks at, within its frame: the weights of a head are a softmax over all patches, in both directions.

# %%
q, k = (named[f"vision.blocks.0.attn.{name}"] for name in ("q", "k"))
weights_HTT = torch.einsum("thj,shj->hts", q, k).mul(q.shape[-1] ** -0.5).softmax(-1)
query = int((places == torch.tensor([height // 2, width // 2])).all(1).nonzero())
figure = plt.figure(figsize=(9, 2), layout="constrained")
for head, axes in enumerate(figure.subplots(1, weights_HTT.shape[0])):
    image = torch.zeros(height, width)
    image[places[:, 0], places[:, 1]] = weights_HTT[head, query]
    axes.imshow(image)
    axes.plot(width // 2, height // 2, "r+")
    axes.set(title=f"head {head}", xticks=[], yticks=[])
plt.show()

core = torch.einsum("hts,shj->thj", weights_HTT, named["vision.blocks.0.attn.v"])
assert torch.allclose(core, named["vision.blocks.0.attn.core"], atol=1e-5)

# %% [markdown]
# ## 5. The pyramid
#
# The first blocks are dense. Behind them the number of experts grows from block to block, while a patch still chooses
# the same few: the work stays the same, and the tower knows more. The release has 4 to 64 experts in its last 17
# blocks.

# %%
experts = released().vision.experts
figure = plt.figure(figsize=(8, 2.6), layout="constrained")
left, right = figure.subplots(1, 2)
left.bar(range(len(experts)), experts)
left.set(title="experts of each block, release", xlabel="block", ylabel="experts")
chosen = named["vision.blocks.5.ffn.router.expert_ids"]
right.bar(range(vision.experts[5]), torch.bincount(chosen.flatten(), minlength=vision.experts[5]))
right.set(title="patches that chose an expert, block 5", xlabel="expert", ylabel="patches")
plt.show()

assert sum(experts) == 608
assert chosen.shape[1] == vision.num_experts_per_tok

# %% [markdown]
# An expert is chosen by its score plus a bias, and weighed by its score alone. The bias is stored in float32 and has to
# stay so: rounded to bfloat16 it moves the ranking.

# %%
scores, ranked = (named[f"vision.blocks.5.ffn.router.{name}"] for name in ("scores", "choice"))
own = scores.gather(-1, chosen)
assert torch.allclose(named["vision.blocks.5.ffn.router.weights"], own / own.sum(-1, keepdim=True))
bias = weights["vision_encoder.blocks.5.mlp.router_bias"]
distinct = {dtype: len(bias.to(dtype).unique()) for dtype in (torch.float32, torch.bfloat16)}
print(f"{len(bias)} biases: {distinct[torch.float32]} values in float32, {distinct[torch.bfloat16]} in bfloat16")
assert distinct[torch.bfloat16] < distinct[torch.float32] == len(bias)

# %% [markdown]
# ## 6. Same values, other order
#
# Take the squares column by column instead of row by row. Nothing is lost, all sums and means are right, and every
# output row is wrong. The comparison tells that apart from a large error.

# %%
faults = {fault.id: fault for fault in VISION_FAULTS}
case = VisionCase.parse("1x2x4")


def compared(fault_id: str, line: VisionCase = case):
    port = VisionReferenceRunner(config, weights, torch.float64, faults=[faults[fault_id]])
    right = VisionReferenceRunner(config, weights, torch.float64)
    return compare_vision_exact(lambda dtype: right, run_case(port, vision, line), line)


found = compared("vision_merge_order_column_major")
print(found.orders[0])
assert found.first.name == "vision.merger.grouped"
assert found.orders[0].permutation == (0, 2, 1, 3, 4, 6, 5, 7)

# %% [markdown]
# Some mistakes need company to show: with one image, attention over the whole call is right.

# %%
for line in ("1x4x6", "1x4x6 1x2x2"):
    found = compared("vision_attention_across_images", VisionCase.parse(line))
    print(f"{line:14} {'first different at ' + found.first.name if found.first else 'agrees'}")
assert found.first.name == "vision.blocks.0.attn.core"
assert not compared("vision_attention_across_images", VisionCase.parse("1x4x6")).is_different

# %% [markdown]
# ## 7. The budget of a video
#
# A video is frames, and each frame is an image. How many, and how large, follows from one search: rate and size fall
# together until all frames fit the budget. Short videos are seen at one frame a second and full size; longer ones
# first lose both, then are thinned out at the smallest size of 128 tokens.

# %%
BUDGET = 65536
minutes = np.geomspace(0.1, 240, 60)
plans = [solve(720, 1280, 30.0, 60 * m, BUDGET, frame_cap(BUDGET)) for m in minutes]
figure = plt.figure(figsize=(8, 2.8), layout="constrained")
for axes, values, title in zip(
    figure.subplots(1, 3),
    ([p.frames for p in plans], [p.frame_tokens for p in plans], [p.usage for p in plans]),
    ("frames", "tokens of a frame", "tokens in all"),
    strict=True,
):
    axes.plot(minutes, values, ".-", markersize=3)
    axes.set(title=title, xlabel="minutes", xscale="log")
axes.axhline(BUDGET, color="red", linewidth=0.8)
plt.show()

assert all(plan.usage <= BUDGET for plan in plans)
assert [plan.branch for plan in plans] == sorted((plan.branch for plan in plans), key=["full", "bisect", "floor"].index)
assert all(earlier.frame_tokens >= later.frame_tokens for earlier, later in pairwise(plans))

# %% [markdown]
# ## What to change to see it break
#
# * In step 1 number the patches in raster order (`places = torch.cartesian_prod(...)`): the last assertion fails.
# * In step 4 build the tower inside `applied([faults["vision_attention_across_images"]])`, from `parity.faults.fault`,
#   and run it there: the first image no longer has its own bits.
# * In step 5 take `vision.blocks.3`, which has four experts: a patch chooses all but one of them.
# * In step 6 try the other faults of `VISION_FAULTS`, with cases such as `2x2x4 1x4x2` for those that need frames.
