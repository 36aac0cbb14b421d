"""The convolution stem of the audio tower around its convolutions: the first one whole, GELU and mask of the others.

stem_first:     y[l, p, c] = gelu(bias[c] + Σ_ij weight[c, i, j] · x[2l - 1 + i, 2p - 1 + j])   where l is valid, else 0
stem_activate_: y[l, p, c] = gelu(y[l, p, c] + bias[c])                                         where l is valid, else 0
stem_convolve:  the sums in between, over all channels, by the library

gelu(x) = x / 2 · (1 + erf(x / √2)). Time is the height of the picture and frequency its width, channels last, so that a
frame is one stretch of memory. The chunks of a batch lie behind each other in one picture, each with a gap of one token
behind it: 8, 4, 2 and 1 frames at the stages. A convolution reaches one frame back; the mask keeps the gap at zero, and
so no chunk sees another. Frame l of a stage is valid if it lies less than v behind its chunk's first, where v halves,
rounded up, with each stage.

The first convolution has one channel: nine lanes, padded to 16 for one product a tile, read from the features as they
come. What is not valid is not read. Float32 inside, one rounding, of `stem_first` a second one where features become
activations. Source: audio specification, section 6.

H200, bfloat16, released sizes, 8 full chunks, events and a cold cache, µs: stem_first 762 (1.9 TB/s written; nine
multiply-adds a value in place of the product 2328), stem_activate_ behind the second convolution 198. The library's
erf in both took 1684 and 311. The second convolution runs at 680 TFLOP/s over all chunks in one picture, at 620 over a
batch of them.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from optimized.errors import KernelInputError
from optimized.kernels.common import check_tensor, dot, round_to, tile, tl, triton, widen
from optimized.kernels.gelu import gelu

# L frames of a stage  R token rows with gaps  M mel bins  P rows of frequencies  C channels  B chunks

STAGES = 3
TAPS = 3
# Places and channels of a tile of the first convolution, and warps.
FIRST_TILING = (64, 64, 4)


class StemRows(NamedTuple):
    """Where the chunks of a picture lie, all int32 on the device, in token rows: a chunk's tokens and its gap.

    `chunk_R`: the chunk of each row; `first_B`: its first row; `frames_B`: valid frames of its features.
    """

    chunk_R: Tensor
    first_B: Tensor
    frames_B: Tensor


@triton.jit
def _place(row_L, is_row_L, chunk_R, first_B, frames_B, SHIFT: tl.constexpr):
    """Chunk of a frame of the stage with 2^SHIFT frames a token, its frame in the chunk, valid frames of features."""
    chunk_L = tl.load(chunk_R + (row_L >> SHIFT), mask=is_row_L, other=0)
    first_L = tl.load(first_B + chunk_L, mask=is_row_L, other=0)
    return chunk_L, first_L, row_L - (first_L << SHIFT), tl.load(frames_B + chunk_L, mask=is_row_L, other=0)


@triton.jit
def _stem_first_kernel(
    mel, weight, bias, out, chunk_R, first_B, frames_B, mel_row, rows, M, P, C,
    BLOCK_Q: tl.constexpr, BLOCK_C: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """A tile of places (frame, row of frequencies), one tile of channels after the other."""
    place_Q = tl.program_id(0).to(tl.int64) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    row_Q, frequency_Q = (place_Q // P).to(tl.int32), (place_Q % P).to(tl.int32)
    is_row_Q = row_Q < rows
    chunk_Q, first_Q, frame_Q, frames_Q = _place(row_Q, is_row_Q, chunk_R, first_B, frames_B, 2)
    is_valid_Q = is_row_Q & (frame_Q < (frames_Q + 1) // 2)
    tap_K = tl.arange(0, 16)
    from_frame_QK = 2 * frame_Q[:, None] - 1 + tap_K[None, :] // 3
    from_bin_QK = 2 * frequency_Q[:, None] - 1 + tap_K[None, :] % 3
    is_read_QK = is_valid_Q[:, None] & (tap_K < 9)[None, :] & (from_bin_QK >= 0) & (from_bin_QK < M)
    is_read_QK = is_read_QK & (from_frame_QK >= 0) & (from_frame_QK < frames_Q[:, None])
    # Features have no gaps.
    from_row_QK = 8 * (first_Q - chunk_Q)[:, None] + from_frame_QK
    x_QK = tl.load(mel + from_row_QK.to(tl.int64) * mel_row + from_bin_QK, mask=is_read_QK, other=0.0)
    x_QK = round_to(x_QK.to(tl.float32), out)
    out += place_Q[:, None] * C
    for first_lane in range(0, C, BLOCK_C):
        lane_C = first_lane + tl.arange(0, BLOCK_C)
        is_lane_C = lane_C < C
        weight_KC = tl.load(
            weight + lane_C[None, :] * 9 + tap_K[:, None], mask=is_lane_C[None, :] & (tap_K < 9)[:, None], other=0.0
        )
        bias_C = tl.load(bias + lane_C, mask=is_lane_C, other=0.0).to(tl.float32)
        sums_QC = dot(x_QK, weight_KC, tl.zeros([BLOCK_Q, BLOCK_C], tl.float32), WIDEN) + bias_C[None, :]
        y_QC = tl.where(is_valid_Q[:, None], gelu(sums_QC), 0.0)
        tl.store(out + lane_C[None, :], round_to(y_QC, out), mask=is_row_Q[:, None] & is_lane_C[None, :])


@triton.jit
def _stem_activate_kernel(
    x, bias, chunk_R, first_B, frames_B, width, C, STAGE: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    _, _, frame, valid = _place(row, row >= 0, chunk_R, first_B, frames_B, SHIFT)
    for _ in tl.static_range(STAGE):
        valid = (valid + 1) // 2
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_lane = lane < width
    pointers = x + row.to(tl.int64) * width + lane
    y = tl.zeros([BLOCK], tl.float32)
    if frame < valid:
        y = tl.load(pointers, mask=is_lane, other=0.0).to(tl.float32)
        y = gelu(y + tl.load(bias + lane % C, mask=is_lane, other=0.0).to(tl.float32))
    tl.store(pointers, round_to(y, x), mask=is_lane)


def valid_frames(rows: StemRows, stage: int) -> Tensor:
    """bool [L], which frames behind `stage` convolutions belong to a chunk's true samples."""
    shift = STAGES - stage
    chunk_L = rows.chunk_R.long().repeat_interleave(1 << shift)
    frames_B = rows.frames_B
    for _ in range(stage):
        frames_B = (frames_B + 1) // 2
    row_L = torch.arange(len(chunk_L), device=chunk_L.device)
    return row_L - (rows.first_B << shift)[chunk_L] < frames_B[chunk_L]


def picture(mel_LM: Tensor, rows: StemRows, dtype: torch.dtype) -> Tensor:
    """Features of chunks behind each other as [L, M] with gaps, rounded to `dtype`, zero where nothing is valid."""
    chunk_L = rows.chunk_R.long().repeat_interleave(1 << STAGES)
    from_row_L = torch.arange(len(chunk_L), device=chunk_L.device) - (chunk_L << STAGES)
    x_LM = mel_LM[from_row_L.clamp(max=len(mel_LM) - 1)].to(dtype)
    return x_LM.masked_fill(~valid_frames(rows, 0)[:, None], 0.0)


def stem_first_torch(mel_LM: Tensor, weight_C33: Tensor, bias_C: Tensor, rows: StemRows) -> Tensor:
    dtype = weight_C33.dtype
    wide = torch.promote_types(dtype, torch.float32)
    x_LM = picture(mel_LM, rows, dtype).to(wide)
    sums_CLP = F.conv2d(x_LM[None], weight_C33.to(wide)[:, None], bias_C.to(wide), stride=2, padding=1)
    y_LPC = F.gelu(sums_CLP).permute(1, 2, 0) * valid_frames(rows, 1)[:, None, None]
    return y_LPC.to(dtype).contiguous()


def stem_first_triton(mel_LM: Tensor, weight_C33: Tensor, bias_C: Tensor, rows: StemRows) -> Tensor:
    """Mask, first convolution, GELU and mask.

    mel_LM: 8 frames of features for each token of each chunk, without gaps, float32, any row stride; weight_C33 (time
    before frequency) and bias_C: float32 or bfloat16.
    Returns: [4R, P, C] in the dtype of the weight, dense, P half the mel bins rounded up.
    Raises: KernelInputError for another shape, dtype or a last dim that is not dense.
    """
    check_tensor("mel", mel_LM, (None, None), torch.float32)
    check_tensor("weight", weight_C33, (None, TAPS, TAPS), torch.float32, torch.bfloat16)
    M, C = mel_LM.shape[1], len(weight_C33)
    check_tensor("bias", bias_C, (C,), weight_C33.dtype)
    _check_dense("weight", weight_C33)
    R = _check_rows(rows)
    P = (M + 1) // 2
    out_LPC = torch.empty(R << 2, P, C, dtype=weight_C33.dtype, device=mel_LM.device)
    if not out_LPC.numel():
        return out_LPC
    block_Q, block_C, warps = FIRST_TILING
    _stem_first_kernel[(triton.cdiv((R << 2) * P, block_Q),)](
        mel_LM,
        weight_C33,
        bias_C,
        out_LPC,
        *rows,
        mel_LM.stride(0),
        R << 2,
        M,
        P,
        C,
        BLOCK_Q=block_Q,
        BLOCK_C=tile(C, largest=block_C),
        WIDEN=widen(weight_C33.dtype),
        num_warps=warps,
    )
    return out_LPC


def stem_convolve(x_LPC: Tensor, weight_C33C: Tensor) -> Tensor:
    """The sums of a 3x3 convolution with stride 2 and zeros around it, [L / 2, P / 2, C], dense; rounded once.

    weight_C33C: channels out, time, frequency, channels in. Without its bias, which `stem_activate_` adds.
    """
    picture_1CLP = x_LPC.permute(2, 0, 1)[None]
    # In float32, TF32 would leave ten bits of a factor.
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        sums_1CLP = F.conv2d(picture_1CLP, weight_C33C.permute(0, 3, 1, 2), stride=2, padding=1)
    return sums_1CLP[0].permute(1, 2, 0).contiguous()


def stem_activate_torch_(x_LPC: Tensor, bias_C: Tensor, rows: StemRows, stage: int) -> Tensor:
    wide = torch.promote_types(x_LPC.dtype, torch.float32)
    y_LPC = F.gelu(x_LPC.to(wide) + bias_C.to(wide))
    return x_LPC.copy_(y_LPC.masked_fill(~valid_frames(rows, stage)[:, None, None], 0.0))


def stem_activate_triton_(x_LPC: Tensor, bias_C: Tensor, rows: StemRows, stage: int) -> Tensor:
    """Bias, GELU and mask behind the convolution number `stage` (2 or 3), in place.

    x_LPC: float32 or bfloat16, dense, 2^(3 - stage) frames for each token row; bias_C: the same dtype.
    Returns: `x_LPC`. Raises: KernelInputError for another shape, dtype, or a tensor that is not dense.
    """
    R = _check_rows(rows)
    shift = STAGES - stage
    check_tensor("x", x_LPC, (R << shift, None, None), torch.float32, torch.bfloat16)
    L, P, C = x_LPC.shape
    check_tensor("bias", bias_C, (C,), x_LPC.dtype)
    _check_dense("x", x_LPC)
    block = tile(P * C, largest=2048)
    if x_LPC.numel():
        _stem_activate_kernel[(L, triton.cdiv(P * C, block))](
            x_LPC, bias_C, *rows, P * C, C, STAGE=stage, SHIFT=shift, BLOCK=block, num_warps=4
        )
    return x_LPC


def _check_dense(name: str, tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        raise KernelInputError(f"expected a dense {name}, found strides {tensor.stride()}")


def _check_rows(rows: StemRows) -> int:
    """Token rows. Raises: KernelInputError."""
    check_tensor("chunk", rows.chunk_R, (None,), torch.int32)
    check_tensor("first", rows.first_B, (None,), torch.int32)
    check_tensor("frames", rows.frames_B, (len(rows.first_B),), torch.int32)
    return len(rows.chunk_R)
