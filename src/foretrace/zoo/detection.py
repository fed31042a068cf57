"""Object detection by a two-stage network: Faster R-CNN with a feature pyramid.

A batch is (images (batch, 3, side, side) float32, boxes (batch, objects, 4) float32 pixels, labels (batch, objects)
int64 from 1); a box is left, top, right, bottom. Numbers of objects, proposals and samples are fixed, so every step has
the same shapes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from foretrace.training.training import Training
from foretrace.zoo.data import loader
from foretrace.zoo.vision import ResNet

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


_STRIDES = (4, 8, 16, 32, 64)
_OFFSET_SCALE = (10.0, 10.0, 5.0, 5.0)  # of the second stage, so that its offsets have a variance near 1


@dataclass(frozen=True, kw_only=True)
class RectangleScenes:
    """Coloured rectangles on noise, the colour of each by its class."""

    side: int
    objects: int
    classes: int

    def __call__(self, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        image = torch.randn(3, self.side, self.side, generator=generator) * 0.3
        labels = torch.randint(1, self.classes + 1, (self.objects,), generator=generator)
        size = (torch.rand(self.objects, 2, generator=generator) * 0.4 + 0.1) * self.side
        start = torch.rand(self.objects, 2, generator=generator) * (self.side - size)
        boxes = torch.cat([start, start + size], 1).round()
        for (left, top, right, bottom), label in zip(boxes.int().tolist(), labels.tolist(), strict=True):
            image[label % 3, top:bottom, left:right] += 1 + label / self.classes
        return image, boxes, labels


@dataclass(frozen=True, kw_only=True)
class Counts:
    """How many boxes go from stage to stage, per image."""

    per_level: int  # candidates of a level of the pyramid, by score
    proposals: int  # of all levels, after suppression
    first: int  # anchors whose loss counts
    second: int  # proposals whose loss counts


class Pyramid(nn.Module):
    """Four stages of a backbone to five levels of `channels` channels, top-down with lateral connections."""

    def __init__(self, inputs: tuple[int, ...], channels: int) -> None:
        super().__init__()
        self.lateral = nn.ModuleList(nn.Conv2d(each, channels, 1) for each in inputs)
        self.output = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in inputs)

    def forward(self, stages: list[Tensor]) -> list[Tensor]:
        sides = [lateral(stage) for lateral, stage in zip(self.lateral, stages, strict=True)]
        for i in range(len(sides) - 2, -1, -1):
            above = functional.interpolate(sides[i + 1], size=sides[i].shape[2:], mode="nearest")
            sides[i] = sides[i] + above
        found = [output(side) for output, side in zip(self.output, sides, strict=True)]
        return [*found, functional.max_pool2d(found[-1], 1, stride=2)]


class Proposer(nn.Module):
    """Region proposal network: for every anchor a score and four offsets."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.score = nn.Conv2d(channels, 3, 1)
        self.offset = nn.Conv2d(channels, 12, 1)

    def forward(self, levels: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return per level scores (batch, anchors) and offsets (batch, anchors, 4)."""
        scores, deltas = [], []
        for level in levels:
            found = functional.relu(self.conv(level))
            scores.append(self.score(found).permute(0, 2, 3, 1).flatten(1).float())
            deltas.append(self.offset(found).permute(0, 2, 3, 1).reshape(len(level), -1, 4).float())
        return scores, deltas


class FasterRCNN(nn.Module):
    """Backbone, pyramid, proposals, RoIAlign and a head of two linear layers. In training it gives the four losses.

    Batch norm of the backbone is trained, not frozen: there are no pretrained statistics.
    """

    def __init__(
        self, backbone: ResNet, *, width: int, channels: int, hidden: int, classes: int, side: int, scale: int,
        counts: Counts,
    ) -> None:  # fmt: skip
        super().__init__()
        self.side, self.counts, self.classes = side, counts, classes
        self.backbone = backbone
        self.pyramid = Pyramid(tuple(4 * (width << i) for i in range(4)), channels)
        self.proposer = Proposer(channels)
        self.head = nn.Sequential(
            nn.Flatten(), nn.Linear(channels * 49, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU()
        )
        self.label = nn.Linear(hidden, classes + 1)
        self.offset = nn.Linear(hidden, 4 * (classes + 1))
        made = anchors(side, _STRIDES, scale)
        self.per_level = [len(each) for each in made]
        self.register_buffer("anchors", torch.cat(made), persistent=False)
        self.register_buffer("offset_scale", torch.tensor(_OFFSET_SCALE), persistent=False)

    def forward(self, images: Tensor, boxes: Tensor, labels: Tensor) -> dict[str, Tensor]:
        levels = self.pyramid(self.backbone.features(images))
        scores, deltas = self.proposer(levels)
        losses = self._first_losses(torch.cat(scores, 1), torch.cat(deltas, 1), boxes)
        with torch.no_grad():
            proposals = torch.cat([self._proposals(scores, deltas), boxes], 1)
        return losses | self._second_losses(levels[:4], proposals, boxes, labels)

    def _proposals(self, scores: list[Tensor], deltas: list[Tensor]) -> Tensor:
        """Return the best boxes (batch, proposals, 4) of all levels, each level thinned out on its own."""
        assert isinstance(self.anchors, Tensor)  # a registered buffer
        kept_scores, kept_boxes = [], []
        for score, delta, anchor in zip(scores, deltas, self.anchors.split(self.per_level), strict=True):
            best, places = score.topk(min(self.counts.per_level, len(anchor)), 1)
            found = moved(anchor[places], picked(delta, places), self.side)
            kept_scores.append(unsuppressed(found, best, 0.7))
            kept_boxes.append(found)
        every = torch.cat(kept_scores, 1)
        _, places = every.topk(min(self.counts.proposals, every.shape[1]), 1)
        return picked(torch.cat(kept_boxes, 1), places)

    def _first_losses(self, scores: Tensor, deltas: Tensor, boxes: Tensor) -> dict[str, Tensor]:
        """Return object or not, and where, for some anchors of each kind."""
        assert isinstance(self.anchors, Tensor)  # a registered buffer
        every = self.anchors.expand(len(boxes), -1, -1)
        overlaps = overlap(every, boxes)
        most, which = overlaps.max(2)
        best = (overlaps == overlaps.amax(1, keepdim=True)) & (overlaps > 0)  # no object without an anchor
        positive = (most >= 0.7) | best.any(2)
        negative = (most < 0.3) & ~positive
        count = self.counts.first
        there, counts_there = chosen(positive, count // 2)
        absent, counts_absent = chosen(negative, count - count // 2)
        places, weight = torch.cat([there, absent], 1), torch.cat([counts_there, counts_absent], 1)
        truth = torch.cat([torch.ones_like(counts_there), torch.zeros_like(counts_absent)], 1)
        found = functional.binary_cross_entropy_with_logits(picked(scores, places), truth, weight, reduction="sum")
        wanted = offsets(picked(every, there), picked(boxes, picked(which, there)))
        apart = functional.smooth_l1_loss(picked(deltas, there), wanted, beta=1 / 9, reduction="none").sum(2)
        share = 1 / (len(boxes) * count)
        return {"objectness": found * share, "proposal": (apart * counts_there).sum() * share}

    def _second_losses(
        self, levels: list[Tensor], proposals: Tensor, boxes: Tensor, labels: Tensor
    ) -> dict[str, Tensor]:
        """Return which class, and where, for some proposals: at most a quarter with an object."""
        assert isinstance(self.offset_scale, Tensor)  # a registered buffer
        count = self.counts.second
        with torch.no_grad():
            most, which = overlap(proposals, boxes).max(2)
            there, counts_there = chosen(most >= 0.5, count // 4)
            absent, counts_absent = chosen(most < 0.5, count - count // 4)
            regions = picked(proposals, torch.cat([there, absent], 1))
            near = picked(which, there)
            truth = torch.cat([picked(labels, near), torch.zeros_like(absent)], 1).flatten()
            weight = torch.cat([counts_there, counts_absent], 1).flatten()
            wanted = offsets(regions[:, : count // 4], picked(boxes, near)) * self.offset_scale
        found = self.head(aligned(levels, _STRIDES, regions))
        told = functional.cross_entropy(self.label(found).float(), truth, reduction="none")
        deltas = self.offset(found).float().view(len(boxes), count, self.classes + 1, 4)[:, : count // 4]
        of_class = picked(labels, near)[:, :, None, None].expand(-1, -1, 1, 4)
        apart = functional.smooth_l1_loss(deltas.gather(2, of_class).squeeze(2), wanted, reduction="none").sum(2)
        share = 1 / (len(boxes) * count)
        return {"label": (told * weight).sum() * share, "box": (apart * counts_there).sum() * share}


def detection_loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Return the sum of the losses of both stages."""
    found: dict[str, Tensor] = model(*batch)
    return torch.stack(list(found.values())).sum()


def detector(size: str) -> Training:
    if size == "full":  # ResNet-50 with a pyramid of 256 channels and 90 classes: 42 million parameters
        model = FasterRCNN(
            ResNet((3, 4, 6, 3), classes=0), width=64, channels=256, hidden=1024, classes=90, side=800, scale=8,
            counts=Counts(per_level=1000, proposals=1000, first=256, second=512),
        )  # fmt: skip
        batches = loader(RectangleScenes(side=800, objects=8, classes=90), batch_size=2)
    else:
        model = FasterRCNN(
            ResNet((1, 1, 1, 1), width=8, classes=0), width=8, channels=24, hidden=96, classes=8, side=96, scale=4,
            counts=Counts(per_level=48, proposals=64, first=32, second=32),
        )  # fmt: skip
        batches = loader(RectangleScenes(side=96, objects=4, classes=8), batch_size=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    return Training(name="detector", model=model, optimizers=(optimizer,), loader=batches, loss=detection_loss)
