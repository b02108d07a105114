"""Budgets of patches: the fixed sizes that graphs of an encoder are captured for."""

from dataclasses import astuple, replace

from torch_ops._core.checks import check_int, refuse
from torch_ops.models.vision_metadata import Padding, VisionSizes

# Patches that an image or a frame has on average, where a budget does not say how many there may be: those of 256 x 256
# pixels, the smallest image that Qwen3-VL's processor makes. Many more segments would make attention take its kernels
# for small ones.
PATCHES_OF_AN_IMAGE = 256
# The same of a window: 64 but for those at the edges.
PATCHES_OF_A_WINDOW = 32

# Patches of a merged cell, in all families.
UNIT = 4


def token_budgets(max_tokens: int, min_tokens: int | None = None, per_doubling: int = 1) -> list[int]:
    """Return numbers of patches from min_tokens to max_tokens, `per_doubling` evenly spaced ones for each doubling.

    min_tokens defaults to 256, or to max_tokens if that is less. Numbers are rounded up to multiples of 4. The largest
    share of padding in a batch is half with one budget per doubling, a third with two, a fifth with four.
    """
    op = "token_budgets"
    max_tokens, per_doubling = check_int(op, "max_tokens", max_tokens), check_int(op, "per_doubling", per_doubling)
    min_tokens = min(256, max_tokens) if min_tokens is None else check_int(op, "min_tokens", min_tokens)
    if max_tokens < 1:
        refuse(op, "max_tokens", "1 or more", max_tokens)
    if not 1 <= min_tokens <= max_tokens:
        refuse(op, "min_tokens", f"from 1 to max_tokens, {max_tokens}", min_tokens)
    if per_doubling < 1:
        refuse(op, "per_doubling", "1 or more", per_doubling)
    budgets, start = {max_tokens}, min_tokens
    while start < max_tokens:
        budgets.update(start + start * step // per_doubling for step in range(per_doubling))
        start *= 2
    return sorted({-(-budget // UNIT) * UNIT for budget in budgets if budget <= max_tokens})


def whole_budgets(op: str, name: str, budget: int | Padding, sizes: VisionSizes) -> set[Padding]:
    """With a bound on everything that has one; and one more for a single frame, where segments have none.

    Attention has a schedule for one segment, which it takes by their number, empty ones included.
    """
    padding = budget if isinstance(budget, Padding) else Padding(rows=budget)
    try:
        padding = padding.with_integers(op, name)
    except ValueError:
        refuse(op, name, "integers from 1 on", budget)
    if any(size is not None and size < 1 for size in astuple(padding)):
        refuse(op, name, "integers from 1 on", budget)
    rows, unit = padding.rows or 0, sizes.merge_size**2
    if rows < unit or rows % unit:
        refuse(op, name, f"of a multiple of {unit} patches", padding.rows)
    images = max(2, -(-rows // PATCHES_OF_AN_IMAGE))
    windows = None
    if sizes.window is not None:
        windows = rows // PATCHES_OF_A_WINDOW + 4 if padding.windows is None else padding.windows
    padding = replace(padding, images=images if padding.images is None else padding.images, windows=windows)
    if padding.segments is not None:
        return {padding}
    return {replace(padding, images=1, segments=1), replace(padding, segments=images)}


def words_of(sizes: Padding) -> str:
    windows = "" if sizes.windows is None else f", {sizes.windows} windows"
    return f"{sizes.rows} patches, {sizes.images} images, {sizes.segments} frames{windows}"


__all__ = ["token_budgets", "whole_budgets", "words_of"]
