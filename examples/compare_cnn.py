"""Train a small convolutional network on scikit-learn's digits: AdamW, and Muon with both words for convolutions.

Each is trained at four rates with three seeds, in one process, and the best rate is the one with the lowest mean
validation loss. Muon's inner AdamW has AdamW's best rate. With ``convolutions="elementwise"``, Muon trains the hidden
linear alone; with ``"flatten"``, the convolutions as well.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from run_folder import write_whole
from torch import Tensor, nn
from tqdm import tqdm

from lwopt_backend import LayerWiseOptimizer

SEEDS, STEPS, BATCH = (0, 1, 2), 150, 128
ADAMW_RATES, MUON_RATES = (1e-3, 2e-3, 4e-3, 8e-3), (0.01, 0.02, 0.04, 0.08)
ARMS = {"AdamW": "", "Muon, elementwise": "elementwise", "Muon, flatten": "flatten"}


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.conv, self.conv2 = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(self.norm2(self.conv(self.norm(x).relu())).relu())


class DigitsNet(nn.Module):
    """0.13 M parameters, of which convolutions are 90 %."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 32, 3, padding=1)
        self.blocks = nn.Sequential(Residual(32), nn.Conv2d(32, 64, 3, stride=2, padding=1), Residual(64))
        self.norm, self.hidden, self.head = nn.BatchNorm2d(64), nn.Linear(64, 128), nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        pooled = self.norm(self.blocks(self.stem(images))).relu().mean((2, 3))
        return self.head(self.hidden(pooled).relu())


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images and labels to train on, and every fifth to validate."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise SystemExit(f"the digits are scikit-learn's ({error}); run: pip install scikit-learn") from None
    found = load_digits()
    images, labels = torch.tensor(found.images, dtype=torch.float32)[:, None] / 8 - 1, torch.tensor(found.target)
    held_out = torch.arange(len(labels)) % 5 == 0
    return images[~held_out], labels[~held_out], images[held_out], labels[held_out]


def optimizer_of(model: nn.Module, word: str, lr: float, adamw_lr: float) -> Any:
    if not word:
        return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    adamw = {"name": "adamw", "weight_decay": 0.01}
    options = {"convolutions": word, "elementwise": adamw, "elementwise_lr": adamw_lr, "report": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that Muon trains the smaller part, which this compares
        return LayerWiseOptimizer(model, lr=lr, weight_decay=0.01, **options)


def batches(count: int, seed: int) -> Iterator[Tensor]:
    """The batches of a seed, the same for every optimizer."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        yield torch.randint(count, (BATCH,), generator=generator)


def train(data: tuple[Tensor, Tensor, Tensor, Tensor], word: str, lr: float, adamw_lr: float, seed: int) -> Any:
    """The validation loss and the accuracy at the end; the rate falls linearly to zero."""
    images, labels, held_out, answers = data
    torch.manual_seed(seed)
    model = DigitsNet()
    optimizer = optimizer_of(model, word, lr, adamw_lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    for chosen in batches(len(labels), seed):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[chosen]), labels[chosen]).backward()
        optimizer.step()
        schedule.step()
    model.eval()
    with torch.no_grad():
        logits = model(held_out)
    return nn.functional.cross_entropy(logits, answers).item(), (logits.argmax(1) == answers).float().mean().item()


def compare_cnn(folder: Path) -> None:
    """Train every arm, write ``cnn.json`` and print the table."""
    data, results, adamw_lr = digits(), {}, 0.0
    with tqdm(total=len(ARMS) * len(MUON_RATES) * len(SEEDS), unit="run", disable=None) as bar:
        for name, word in ARMS.items():
            by_rate = {}
            for lr in MUON_RATES if word else ADAMW_RATES:
                runs = []
                for seed in SEEDS:
                    bar.set_description(f"{name}, {lr:g}")
                    runs.append(train(data, word, lr, adamw_lr, seed))
                    bar.update()
                by_rate[lr] = {"losses": [loss for loss, _ in runs], "accuracies": [right for _, right in runs]}
            best = min(by_rate, key=lambda lr: mean(by_rate[lr]["losses"]))
            adamw_lr = adamw_lr or best
            results[name] = {"best": best, "by_rate": by_rate}
    write_whole(folder / "cnn.json", json.dumps(results, indent=1).encode())
    print("| | rate: validation loss, mean of three seeds | by seed at the best | accuracy |")
    print("| --- | --- | --- | --- |")
    for name, found in results.items():
        means = {lr: f"{lr:g}: {mean(runs['losses']):.4f}" for lr, runs in found["by_rate"].items()}
        shown = ", ".join(f"**{text}**" if lr == found["best"] else text for lr, text in means.items())
        at_best = found["by_rate"][found["best"]]
        losses = ", ".join(f"{loss:.4f}" for loss in at_best["losses"])
        print(f"| {name} | {shown} | {losses} | {mean(at_best['accuracies']):.2%} |")
