"""An image for a model that takes some: random pixels, and as many image tokens as the model makes of them.

Two ways of taking images are known: [images, channels, height, width], and patches in rows with a grid that says where
they lie. How many tokens one becomes is asked of the model itself (`get_image_features`).
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from rl_parallel_plans.errors import PlanError

Extra = dict[str, Tensor]


@torch.no_grad()
def image_inputs(model: nn.Module, *, images: int, generator: torch.Generator) -> tuple[Extra, int, int]:
    """Arguments of forward for `images` images, the id of an image token, and how many of them an image is.

    Raises PlanError where this model takes its images in another way.
    """
    config: Any = getattr(model, "config", None)
    token = next(
        (t for n in ("image_token_id", "image_token_index") if (t := getattr(config, n, None)) is not None), None
    )
    vision = getattr(config, "vision_config", None)
    if token is None or vision is None or not hasattr(model, "get_image_features"):
        raise PlanError("this model names no image token, or does not say what it makes of an image")
    parameters = inspect.signature(model.forward).parameters
    if "image_grid_thw" in parameters:
        extra = _patches(vision, images, generator)
    else:
        extra = _pixels(vision, images, generator, with_sizes="image_sizes" in parameters)
    features = _rows(model.get_image_features(**extra))  # type: ignore[operator]
    if not features or features % images:
        raise PlanError(f"this model makes {features} tokens of {images} images of one size")
    return extra, int(token), features // images


def _patches(vision: Any, images: int, generator: torch.Generator) -> Extra:
    """Four tokens an image: a square of two by two merged patches."""
    side = 2 * int(getattr(vision, "spatial_merge_size", 2))
    channels = int(getattr(vision, "in_channels", None) or getattr(vision, "in_chans", None) or 3)
    features = channels * int(getattr(vision, "temporal_patch_size", 1)) * int(vision.patch_size) ** 2
    pixels = torch.randn(images * side * side, features, generator=generator)
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, side, side]] * images)}


def _pixels(vision: Any, images: int, generator: torch.Generator, *, with_sizes: bool) -> Extra:
    size = getattr(vision, "image_size", None)
    size = size[0] if isinstance(size, list | tuple) else size
    if not isinstance(size, int):
        raise PlanError("this model does not say how large its images are")
    extra = {"pixel_values": torch.randn(images, 3, size, size, generator=generator)}
    return {**extra, "image_sizes": torch.tensor([[size, size]] * images)} if with_sizes else extra


def _rows(features: Any) -> int:
    """Vectors in what `get_image_features` returned, whose form has changed between releases."""
    found = getattr(features, "pooler_output", None)
    found = features if found is None else found
    if isinstance(found, Tensor):
        return found.numel() // found.shape[-1]
    return sum(map(_rows, found)) if isinstance(found, tuple | list) else 0
