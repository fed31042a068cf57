"""VGG-16 (Simonyan and Zisserman, ICLR 2015, configuration D), 138 million parameters."""

from __future__ import annotations

from torch.optim import SGD

from foretrace.training.training import Training
from foretrace.zoo.data import loader
from foretrace.zoo.vision import VGG11, Photo, classification_loss


class VGG16(VGG11):
    """Two convolutions more in each of the last three parts, one more in the first two."""

    PLAN = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))


def training() -> Training:
    """224 x 224 pixels, 1,000 classes."""
    model = VGG16()
    batches = loader(Photo(side=224, classes=1000), batch_size=32)
    optimizer = SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    return Training(name="vgg16", model=model, optimizers=(optimizer,), loader=batches, loss=classification_loss)
