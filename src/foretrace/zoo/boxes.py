"""Boxes of a detector: overlap, offsets, anchors, suppression, sampling and RoIAlign, with fixed numbers of everything.

Boxes are (..., 4) float32 pixels: left, top, right, bottom.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

_MOST_GROWTH = math.log(1000 / 16)  # of width and height by a predicted offset
_BINS, _POINTS = 7, 2  # RoIAlign: bins a side of a region, sampling points a side of a bin


def overlap(first: Tensor, second: Tensor) -> Tensor:
    """Return intersection over union (batch, n, m) of boxes (batch, n, 4) and (batch, m, 4)."""
    start = torch.maximum(first[:, :, None, :2], second[:, None, :, :2])
    end = torch.minimum(first[:, :, None, 2:], second[:, None, :, 2:])
    common = (end - start).clamp(min=0).prod(-1)
    areas = _area(first)[:, :, None] + _area(second)[:, None, :]
    return common / (areas - common).clamp(min=1e-6)


def offsets(boxes: Tensor, truth: Tensor) -> Tensor:
    """Return what moves `boxes` to `truth`: of the centre in box sizes, and logarithms of both ratios of size."""
    size, wanted = _size(boxes), _size(truth)
    moved = ((truth[..., :2] + truth[..., 2:]) - (boxes[..., :2] + boxes[..., 2:])) / 2 / size
    return torch.cat([moved, (wanted / size).log()], -1)


def moved(boxes: Tensor, by: Tensor, side: int) -> Tensor:
    """Return boxes with their predicted offsets, inside an image of side x side."""
    size = _size(boxes)
    centre = (boxes[..., :2] + boxes[..., 2:]) / 2 + by[..., :2] * size
    half = size * by[..., 2:].clamp(max=_MOST_GROWTH).exp() / 2
    return torch.cat([centre - half, centre + half], -1).clamp(0, side)


def anchors(side: int, strides: tuple[int, ...], scale: int) -> list[Tensor]:
    """Return, per level of the pyramid (positions x 3, 4), boxes of `scale` strides in three shapes."""
    made = []
    for stride in strides:
        count = -(-side // stride)
        places = (torch.arange(count) + 0.5) * stride
        y, x = torch.meshgrid(places, places, indexing="ij")
        centre = torch.stack([x, y], -1).flatten(0, 1)[:, None]
        ratio = torch.tensor([0.5, 1.0, 2.0]).sqrt()
        half = torch.stack([1 / ratio, ratio], -1) * (scale * stride / 2)
        made.append(torch.cat([centre - half, centre + half], -1).flatten(0, 1))
    return made


def unsuppressed(boxes: Tensor, scores: Tensor, most_overlap: float) -> Tensor:
    """Return scores (batch, n), highest first, with -inf where a box overlaps one of higher score by more than allowed.

    All at once by one matrix (Fast NMS: Bolya et al., YOLACT, ICCV 2019, section 5), not one box after another:
    no loop whose length depends on the data.
    """
    above = overlap(boxes, boxes).triu(1).amax(1)
    return scores.masked_fill(above > most_overlap, float("-inf"))


def chosen(candidates: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return `count` of the candidates (batch, n; bool) by lot: places (batch, count), and 1.0 for a candidate."""
    lots = torch.rand(candidates.shape, device=candidates.device) - (~candidates).float()
    found, places = lots.topk(count, 1)
    return places, (found >= 0).float()


def picked(values: Tensor, places: Tensor) -> Tensor:
    """Return rows (batch, k, ...) of `values` (batch, n, ...) at `places` (batch, k)."""
    return values.gather(1, places.view(*places.shape, *[1] * (values.ndim - 2)).expand(-1, -1, *values.shape[2:]))


def aligned(features: list[Tensor], strides: tuple[int, ...], boxes: Tensor) -> Tensor:
    """Return RoIAlign (He et al., Mask R-CNN, ICCV 2017): (batch x n, channels, 7, 7) of `boxes` (batch, n, 4).

    Each box is read from the level that suits its size (Lin et al. 2017, equation 1). The levels are laid end to end
    as a table of positions, and every bin is a weighted sum of 16 rows: four points of four neighbours.
    """
    device = boxes.device
    table = torch.cat([level.flatten(2) for level in features], 2).transpose(1, 2).float()
    rows = torch.tensor([level.shape[2] for level in features], device=device)
    columns = torch.tensor([level.shape[3] for level in features], device=device)
    begin = (rows * columns).cumsum(0) - rows * columns
    finest = int(math.log2(strides[0]))
    level = (4 + (_area(boxes).clamp(min=1).sqrt() / 224).log2()).floor().long() - finest
    level = level.clamp(0, len(features) - 1)
    stride = torch.tensor(strides[: len(features)], device=device)[level]

    steps = (torch.arange(_BINS * _POINTS, device=device) + 0.5) / (_BINS * _POINTS)

    def line(low: Tensor, high: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        """Return, along one axis, the two neighbours of every point (batch, n, points, 2), and their weights."""
        at = (low[..., None] + (high - low)[..., None] * steps) / stride[..., None] - 0.5
        at = torch.minimum(at.clamp(min=0), (length - 1)[..., None])
        left = at.floor()
        right = torch.minimum(left + 1, (length - 1)[..., None])
        share = at - left
        return torch.stack([left, right], -1).long(), torch.stack([1 - share, share], -1)

    x, x_weight = line(boxes[..., 0], boxes[..., 2], columns[level])
    y, y_weight = line(boxes[..., 1], boxes[..., 3], rows[level])

    def bins(of_y: Tensor, of_x: Tensor) -> tuple[Tensor, Tensor]:
        """Return both axes as (batch, n, bins of y, bins of x, points and neighbours of y, and of x)."""
        of_y = of_y.unflatten(2, (_BINS, _POINTS)).flatten(3)[:, :, :, None, :, None]
        return of_y, of_x.unflatten(2, (_BINS, _POINTS)).flatten(3)[:, :, None, :, None, :]

    row, column = bins(y, x)
    width = columns[level].view(*level.shape, 1, 1, 1, 1)
    images = torch.arange(len(boxes), device=device) * table.shape[1]
    place = (images[:, None] + begin[level]).view(*level.shape, 1, 1, 1, 1) + row * width + column
    row_weight, column_weight = bins(y_weight, x_weight)
    weight = row_weight * column_weight / _POINTS**2
    found = functional.embedding_bag(
        place.reshape(-1, 4 * _POINTS**2),
        table.flatten(0, 1),
        per_sample_weights=weight.reshape(-1, 4 * _POINTS**2),
        mode="sum",
    )
    regions: Tensor = found.view(-1, _BINS * _BINS, table.shape[2]).transpose(1, 2).unflatten(2, (_BINS, _BINS))
    return regions


def _size(boxes: Tensor) -> Tensor:
    return (boxes[..., 2:] - boxes[..., :2]).clamp(min=1.0)


def _area(boxes: Tensor) -> Tensor:
    return (boxes[..., 2:] - boxes[..., :2]).clamp(min=0).prod(-1)
