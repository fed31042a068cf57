"""ResNet-101 (He et al., CVPR 2016, table 1), 44.5 million parameters."""

from __future__ import annotations

from torch.optim import SGD

from foretrace.training.training import Training
from foretrace.zoo.data import loader
from foretrace.zoo.vision import Photo, ResNet, classification_loss


def training() -> Training:
    """224 x 224 pixels, 1,000 classes."""
    model = ResNet((3, 4, 23, 3))
    batches = loader(Photo(side=224, classes=1000), batch_size=32)
    optimizer = SGD(model.parameters(), lr=0.0125, momentum=0.9, weight_decay=1e-4)
    return Training(name="resnet101", model=model, optimizers=(optimizer,), loader=batches, loss=classification_loss)
