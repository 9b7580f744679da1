"""Trains what the guardrail sees of a picture: for each decoder a linear probe over the projected rows of the exported vision tower.

    python -m scripts.tiny.probe mmserve/models/tiny

Patches teach which kind they show, whole pictures how much of a kind is enough; both come from scenes that the tower never saw, and so
do the figures.  Writes `probes/vision-NAME.safetensors` and the kinds' vocabulary, `objects.json`; ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
from rich.progress import track
from safetensors.numpy import save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import CLIPVisionModel

from mmserve.composition import load_composition
from mmserve.grounding.probe import LEAST_MASS, LinearProbe, encoder_digest
from scripts.tiny import vision
from scripts.tiny.export import DECODERS, load_projector
from scripts.tiny.render import render
from scripts.tiny.world import KINDS, Scene, sample_scene

FIRST_SEED = 2**30 + 3_000_000  # no other training and no scoring draws these
NUM_PATCH_SCENES, NUM_CURVE_SCENES, NUM_TEST_SCENES = 1500, 600, 1000
BACKGROUND_PATCHES = 40  # of each scene, drawn at random; all that show a thing are used
WEIGHT_DECAY = 1e-4
BATCH = 8
THRESHOLD = 0.5
SYNONYMS: dict[str, tuple[str, ...]] = {
    "pizza": ("pizza slice", "slice of pizza"),
    "mushroom": ("toadstool",),
    "flower": ("sunflower", "blossom"),
    "moon": ("crescent",),
    "fish": ("goldfish", "tropical fish"),
    "frog": ("toad",),
    "pig": ("piglet", "piggy"),
    "dog": ("puppy", "doggy", "hound"),
    "cat": ("kitten", "kitty"),
    "car": ("automobile",),
    "bus": ("autobus",),
    "boat": ("sailboat", "sailing boat", "ship"),
    "rocket": ("spaceship", "rocket ship"),
    "house": ("home", "building"),
    "umbrella": ("parasol",),
    "clock": ("alarm clock",),
}
NOT_OBJECTS = ("hot dog", "key point", "key word", "at home", "tree top", "star sign", "heart of")


@dataclass(frozen=True)
class Seen:
    """Scenes and what the tower makes of them."""

    scenes: list[Scene]
    classes: np.ndarray  # int64 [N, 576]; 0 is background
    features: np.ndarray  # float16 [N, 576, 128]

    @property
    def there(self) -> np.ndarray:
        """bool [N, L]: whether a kind is in a scene."""
        return np.array([[scene.count(kind) > 0 for kind in KINDS] for scene in self.scenes])


@torch.inference_mode()
def look(tower: CLIPVisionModel, first_seed: int, num_scenes: int) -> Seen:
    scenes = [sample_scene(random.Random(first_seed + i)) for i in range(num_scenes)]
    classes, features = [], []
    for start in track(range(0, num_scenes, BATCH), description=f"{num_scenes} scenes"):
        truths = [render(scene, augment=i % 2 == 1) for i, scene in enumerate(scenes[start : start + BATCH])]
        classes += [truth.classes.ravel().astype(np.int64) for truth in truths]
        features.append(vision.features(tower, np.stack([truth.image for truth in truths])).half().numpy())
    return Seen(scenes, np.stack(classes), np.concatenate(features))


def fit_patches(rows: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    """Multinomial logistic regression: rows [N, H] of classes [N] -> weight [1 + L, H], bias [1 + L]."""
    mean, scale = rows.mean(0), rows.std(0) + 1e-6
    scaled = (rows - mean) / scale
    weight = torch.zeros(len(KINDS) + 1, rows.shape[1], requires_grad=True)
    bias = torch.zeros(len(KINDS) + 1, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=120, history_size=10, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(scaled @ weight.T + bias, classes) + WEIGHT_DECAY * weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    with torch.no_grad():
        return weight / scale, bias - (weight / scale) @ mean


def fit_curve(masses: np.ndarray, there: np.ndarray) -> np.ndarray:
    """Platt's scaling of log(mass), both classes weighing the same: [2], slope and offset."""
    evidence = torch.from_numpy(np.log(np.maximum(masses, LEAST_MASS))).float().flatten()
    target = torch.from_numpy(there).float().flatten()
    smoothed = target * (1 - 2e-2) + 1e-2  # else a curve between classes that don't touch gets infinitely steep
    weight = torch.where(target > 0, 0.5 / target.mean(), 0.5 / (1 - target.mean()))
    curve = torch.tensor([1.0, 0.0], requires_grad=True)
    optimizer = torch.optim.LBFGS([curve], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(curve[0] * evidence + curve[1], smoothed, weight=weight)
        loss.backward()
        return loss

    optimizer.step(closure)
    return curve.detach().numpy()


def figures(scores: np.ndarray, there: np.ndarray) -> dict[str, float]:
    """Of kinds that are there, and of those that aren't, how many are told right at THRESHOLD."""
    says = scores >= THRESHOLD
    ranks = np.argsort(np.argsort(scores, axis=None)).reshape(scores.shape) + 1
    num_there, num_not = int(there.sum()), int((~there).sum())
    auc = (ranks[there].sum() - num_there * (num_there + 1) / 2) / (num_there * num_not)
    return {
        "there": num_there,
        "seen": round(float(says[there].mean()), 4),
        "seen_but_not_there": round(float(says[~there].mean()), 5),
        "auc": round(float(auc), 5),
    }


@torch.inference_mode()
def project(directory: Path, decoder: str, features: np.ndarray) -> np.ndarray:
    """The tower's features [..., 128] -> float32 [..., H]."""
    projector = load_projector(directory / "projectors" / f"vision-{decoder}.safetensors")
    return np.asarray(projector(torch.from_numpy(features).float()).numpy())


def write_vocabulary(file: Path) -> None:
    """All kinds and other words for them, as `mmserve.grounding.vocabulary` reads it."""
    objects = {kind: list(SYNONYMS.get(kind, ())) for kind in KINDS}
    file.write_text(json.dumps({"objects": objects, "not_objects": list(NOT_OBJECTS)}, indent=2) + "\n")


def train(
    directory: Path, num_scenes: Sequence[int] = (NUM_PATCH_SCENES, NUM_CURVE_SCENES, NUM_TEST_SCENES)
) -> dict[str, dict[str, float]]:
    """Writes all that the guardrail needs; returns the figures of each decoder."""
    write_vocabulary(directory / "objects.json")
    composition = load_composition(directory)
    tower = CLIPVisionModel.from_pretrained(directory / "vision", dtype=torch.float32).eval()
    starts = [FIRST_SEED + sum(num_scenes[:i]) for i in range(3)]
    to_name, to_weigh, to_test = (look(tower, start, number) for start, number in zip(starts, num_scenes, strict=True))
    rng = np.random.default_rng(0)
    is_used = (to_name.classes > 0) | (rng.random(to_name.classes.shape) < BACKGROUND_PATCHES / to_name.classes.shape[1])
    results = {}
    for name in DECODERS:
        rows = project(directory, name, to_name.features[is_used])
        weight, bias = fit_patches(torch.from_numpy(rows), torch.from_numpy(to_name.classes[is_used]))
        parts = {"weight": weight.numpy().astype(np.float32), "bias": bias.numpy().astype(np.float32)}
        unbent = LinearProbe(tuple(KINDS), **parts, curve=np.array([1.0, 0.0]))
        masses = np.stack([unbent.masses(project(directory, name, one)) for one in to_weigh.features])
        parts["curve"] = fit_curve(masses, to_weigh.there)
        file = directory / "probes" / f"vision-{name}.safetensors"
        file.parent.mkdir(exist_ok=True)
        metadata = {"labels": json.dumps(list(KINDS)), "encoder": encoder_digest(composition.vision[name], name)}
        save_file({key: np.ascontiguousarray(value) for key, value in parts.items()}, file, metadata)
        file.chmod(0o644)  # safetensors writes for its owner alone
        probe = LinearProbe.read(file, composition.vision[name], name)
        scores = np.stack([probe.scores(project(directory, name, one)) for one in to_test.features])
        results[name] = figures(scores, to_test.there) | {
            "enough_patches": round(math.exp(-float(parts["curve"][1]) / float(parts["curve"][0])), 2),
        }
        print(name, results[name])
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="a model directory as scripts.tiny.export writes it")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps({"script": "tiny.probe", "models": train(options.directory)}))


if __name__ == "__main__":
    main()
