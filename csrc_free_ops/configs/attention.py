"""Launches of the attention kernels for which no row was measured."""

from triton import next_power_of_2

from csrc_free_ops.configs.attention_hopper import forward_rule
from csrc_free_ops.configs.attention_hopper_backward import BLOCK_M, BLOCK_N, NUM_WARPS, pipeline_stages
from csrc_free_ops.configs.rows import Config, Gpu


def split_head_dim(head_dim: int, itemsize: int, products: str = "ieee") -> tuple[int, int]:
    """Widths (main, tail) of the column chunks that hold head_dim (tiles/rows.py). Both are powers of two.

    72 and 80 are (64, 16), 96 is (64, 32), 128 is (128, 0). In fp32 no chunk is wider than 32, because a longer chain
    of additions rounds more. 72 is (32, 16) then, and 128 is four chunks, (32, 0). "bf16x6" uses chunks of 64 if they
    divide head_dim, for speed.
    """
    widest = 256 if itemsize < 4 else 64 if products == "bf16x6" and head_dim % 64 == 0 else 32
    main = min(widest, max(16, next_power_of_2(head_dim + 1) // 2))
    remainder = head_dim % main if head_dim > main else 0
    # With a main chunk of 128 a tail of 16 or 32 makes a gradient kernel spill thousands of bytes; a tail of 64 does
    # not.
    tail = max(64 if main == 128 else 16, next_power_of_2(remainder)) if remainder else 0
    return (2 * main, 0) if tail == main < widest else (main, tail)


def covered_width(head_dim: int, itemsize: int) -> int:
    """Columns of a tile: head_dim with the padding of `split_head_dim`."""
    main, tail = split_head_dim(head_dim, itemsize)
    return max(1, head_dim // main) * main + tail


def attention_products(gpu: Gpu, head_dim: int, setting: str) -> str:
    """The input precision of fp32 products in attention, for PyTorch's setting "ieee" or "tf32".

    "ieee" asks for errors no larger than those of fp32 products. On Hopper "bf16x6" meets that on tensor cores: a
    number is the sum of three bfloat16 numbers, and the six largest of their nine products are summed. On an H200 RMS
    errors against fp64 were 0.3 to 0.7 of PyTorch's in fp32.
    """
    width = covered_width(head_dim, 4)
    # Results at 48 columns broke the tolerance rule. With more than 96 columns, except 128, gradients of keys spill
    # with any tile.
    fits = gpu.backend == "cuda" and int(gpu.arch) == 90 and (width <= 96 or width == 128) and width != 48
    return "bf16x6" if setting == "ieee" and fits else setting


def _shared_bytes(kernel: str, config: Config, head_dim: int, itemsize: int) -> int:
    """An upper estimate of the pipeline's shared memory, from the tensors that a kernel holds and streams."""
    width = covered_width(head_dim, itemsize)
    held, streamed, rows, cols = {
        "attention_fwd": (1, 2, config.block_m, config.block_n),
        "attention_bwd_dq": (2, 2, config.block_m, config.block_n),
        "attention_bwd_dkdv": (2, 2, config.block_n, config.block_m),
    }[kernel]
    square = 0 if kernel == "attention_fwd" else config.block_m * config.block_n
    return itemsize * (width * (held * rows + streamed * max(config.num_stages, 1) * cols) + square)


def attention_rule(
    kernel: str, gpu: Gpu, itemsize: int, head_dim: int, masked: bool = False, busy: bool = False,
    precision: str = "ieee",
) -> Config:  # fmt: skip
    """An unmeasured config: the first of a ladder of tiles that fits the shared memory, or the last of them.

    The ladders hold tiles that spill no registers on any target of compile_tests/test_aot.py.
    """
    if gpu.backend == "interpreter":
        # Small tiles, so that short segments in tests still have several blocks.
        if kernel.endswith("_small_segments"):
            return Config(16, 16, 4, 1)
        return Config(16, 32, 4, 1) if "dkdv" in kernel else Config(32, 16, 4, 1)
    width = covered_width(head_dim, itemsize)
    wide = width > 128
    if kernel.endswith("_small_segments"):
        # Only Hopper has wgmma; elsewhere operands take registers too, and 4 warps spill on the oldest GPUs.
        warps = 8 if width > 80 and gpu.backend == "cuda" and int(gpu.arch) < 90 else 4
        return Config(32, 32, 4, 1) if gpu.backend == "hip" else Config(64, 64, warps, 1)
    if kernel.endswith("_long_segments_fallback"):
        # These kernels also hold their search for tiles in registers, and they run rarely.
        if gpu.backend == "hip":
            return Config(16, 16, 4, 1)
        arch = int(gpu.arch)
        if width > 96 or arch < 90:
            return Config(32, 32, 8, 1) if "dkdv" in kernel else Config(32 if arch >= 120 else 64, 16, 8, 1)
        return Config(32, 64, 8, 1) if "dkdv" in kernel else Config(64, 32, 8, 1)
    if kernel == "attention_bwd_hopper":
        return Config(BLOCK_M, BLOCK_N, NUM_WARPS, pipeline_stages(width))
    if kernel == "attention_fwd_hopper":
        return forward_rule(width, masked)
    if itemsize == 4 and (config := _tensor_core_config(kernel, gpu, width, precision, busy)):
        ladder = [config]
    elif itemsize == 4:
        # fp32 products keep whole operands in registers.
        if gpu.backend == "hip":
            return Config(16, 16, 4, 1)
        if kernel == "attention_bwd_dkdv" and width > 96:
            ladder = [Config(16, 32, 8, 1), Config(32, 16, 8, 1)]
        elif kernel == "attention_bwd_dq":
            # With 32 rows of 104 columns a row number spills.
            ladder = [Config(64 if 96 < width < 128 else 32, 16, 8, 1)]
        else:
            ladder = [Config(32, 32, 8, 1), Config(32, 16, 8, 1)]
    elif gpu.backend == "hip":
        ladder = [Config(16, 32, 4, 1)] if busy and "dkdv" in kernel else [Config(32, 32, 4, 1), Config(16, 16, 4, 1)]
    elif busy and kernel == "attention_fwd":
        # Blackwell's accumulators are in tensor memory, which leaves registers for 64 keys; narrower heads spill with
        # 64.
        cols = 64 if width > 96 and 100 <= int(gpu.arch) < 120 else 32
        ladder = [Config(64, 16, 8, 1)] if wide else [Config(64, cols, 8, 2)]
    elif busy and kernel == "attention_bwd_dq" and wide:
        ladder = [Config(32, 16, 8, 1)]
    elif busy and "dkdv" in kernel:
        has_tail = split_head_dim(head_dim, itemsize)[1] > 0
        ladder = [Config(16, 32, 8, 1)] if wide or has_tail else [Config(32, 32, 8, 1)]
    elif kernel == "attention_fwd":
        narrow = [Config(64, 64, 4, 3 if int(gpu.arch) >= 120 else 2)]
        ladder = [Config(64, 32, 8, 2), Config(32, 16, 8, 1)] if wide else narrow
    elif kernel == "attention_bwd_dq":
        ladder = [Config(64, 16, 8, 2), Config(32, 16, 8, 1)] if wide else [Config(64, 32, 8, 2)]
    else:
        ladder = [Config(32, 32, 8, 1)] if wide else [Config(32, 64, 8, 2)]
    for config in ladder:
        if _shared_bytes(kernel, config, head_dim, itemsize) <= gpu.shared_memory:
            return config
    return ladder[-1]


def segment_rule(
    kernel: str, gpu: Gpu, itemsize: int, head_dim: int, masked: bool = False, busy: bool = False,
    precision: str = "ieee",
) -> Config:  # fmt: skip
    """The config of a "segment_attention" kernel, whose pieces of keys take registers beside its tiles.

    Hopper's tiles for up to 128 columns were the fastest on an H200 among those that hardly spill. The calls were ranks
    of four, one document of 8k or 32k tokens.
    """
    hopper = gpu.backend == "cuda" and int(gpu.arch) == 90
    core = kernel.removeprefix("segment_")
    width = covered_width(head_dim, itemsize)
    if hopper and itemsize == 2 and not busy and width > 128:
        if core == "attention_bwd_dq":
            return Config(64, 16, 8, 2) if width <= 192 else Config(32, 16, 4, 1)
        return Config(64, 32, 8, 2) if core == "attention_fwd" else Config(32, 32, 8, 1)
    if hopper and itemsize == 2 and not busy:
        if core == "attention_bwd_dkdv":
            if split_head_dim(head_dim, itemsize)[1] > 0:
                # A tail of columns leaves few registers. Eight warps for 64 keys took twice the time.
                return Config(16, 64, 4, 3)
            # With row strides at run time, the tile for 128 columns spills 8 bytes.
            return Config(32, 64, 4, 3) if width <= 64 else Config(32, 128, 8, 3)
        return Config(128, 64, 8, 3) if core == "attention_bwd_dq" and width == 128 else Config(64, 64, 4, 3)
    if precision == "bf16x6" and core == "attention_bwd_dkdv" and width == 128:
        # It spills 56 bytes, and 304 with 64 keys.
        return Config(16, 32, 8, 1)
    return attention_rule(core, gpu, itemsize, head_dim, masked, True, precision)


def _tensor_core_config(kernel: str, gpu: Gpu, width: int, products: str, busy: bool) -> Config | None:
    """The config for fp32 products on tensor cores, measured on an H200 or an H100, or None.

    Some of these tiles spill, because tiles without spills were slower. The forward of 8 x 32 x 2048 causal rows of 128
    columns took 5.2 ms with 88 bytes spilled and 6.3 ms with none.
    """
    if products == "bf16x6":
        if "dkdv" in kernel:
            narrow = busy or 64 < width < 128
            return Config(16, 128 if 64 < width <= 80 else 64, 8, 1) if narrow else Config(32, 64, 4, 1)
        if width <= 64:
            return Config(64, 32 if busy else 64, 4, 1)
        if busy or width < 128:
            return Config(128, 16 if busy else 32, 8, 1)
        return Config(128, 64, 8, 1) if kernel == "attention_fwd" else Config(64, 32, 4, 1)
    # Only wgmma leaves registers for more than 64 columns.
    hopper = gpu.backend == "cuda" and int(gpu.arch) == 90
    if products != "tf32" or gpu.backend == "hip" or busy or width > 128 or (width > 64 and not hopper):
        return None
    if "dkdv" in kernel:
        return Config(32, 64, 4, 1) if hopper and width <= 64 else Config(32, 128 if hopper else 64, 8, 1)
    # On an H100 dq of 8 x 32 x 2048 causal rows of 128 columns takes 4.0 ms; a tile of 128 x 16 took 5.9 ms.
    return Config(64, 64 if width <= 64 or "dq" not in kernel else 32, 4, 1) if hopper else Config(64, 32, 4, 2)
