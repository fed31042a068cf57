"""A training as users write it: many small layers, so that the optimizer's loop is a third of the step."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, TensorDataset

from foretrace import Training


def training() -> Training:
    layers: list[torch.nn.Module] = []
    for _ in range(25):
        layers += [torch.nn.Linear(48, 48), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.randn(256, 48), torch.randn(256, 48))
    print("what a script prints does not end up in the answer")
    return Training(
        name="mlp",
        model=model,
        optimizers=(optimizer,),
        loader=DataLoader(data, batch_size=32, shuffle=True),
        loss=lambda module, batch: (module(batch[0]) - batch[1]).square().mean(),
    )
