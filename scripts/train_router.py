"""Trains what decides between small and large for a model (`router.json`), from questions that both of its decoders have answered.

    python -m scripts.routing.outcomes --items 3000 --out answers.jsonl.gz     asks them
    python -m scripts.train_router answers.jsonl.gz --out MODEL/router.json    learns from them

Without arguments: the bundled model's, from the answers kept beside this script.  Logistic regression over hashed words and counts, by
Newton's method; nothing is drawn at random, so equal answers give equal files.  Says what the data support: cross-validated AUC with its
interval (Hanley and McNeil, 1982).  Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmserve.composition import BUNDLED
from mmserve.route_classifier import COUNTS, FILE, NUM_BUCKETS, Asked, features
from scripts.routing.outcomes import NUM_ENTROPIES, Outcome, read_outcomes

ANSWERS = Path(__file__).parent / "routing" / "training.jsonl.gz"
WORTH = 1 / 20  # answers that must be mended for each one that is computed by the large decoder instead
NUM_FOLDS = 5
L2 = 1.0
MAX_STEPS, TOLERANCE = 50, 1e-7  # of Newton's method
MAX_CHANCE = 0.01  # that what escalation mended is chance: the threshold was chosen for it, so less than the usual
MAX_ESCALATED = 0.3  # share of answers that may be computed twice
COLUMNS = {name: i for i, name in enumerate((*map(str, range(NUM_BUCKETS)), *COUNTS))}


def asked_of(outcome: Outcome) -> Asked:
    return Asked(outcome.text, len(outcome.text), outcome.num_images, outcome.num_clips)


def matrix(outcomes: Sequence[Outcome]) -> np.ndarray:
    """float64 [N, columns]."""
    rows = np.zeros((len(outcomes), len(COLUMNS)))
    for row, outcome in zip(rows, outcomes, strict=True):
        for name, value in features(asked_of(outcome)).items():
            row[COLUMNS[name]] = value
    return rows


def gains(outcomes: Sequence[Outcome]) -> np.ndarray:
    """int [N]: 1 where only the large decoder is right, -1 where only the small one is."""
    return np.array([int(each.attempts["large"].right) - int(each.attempts["small"].right) for each in outcomes])


def fit(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Weights [columns] of a logistic regression with an L2 penalty on all but the bias."""
    used = np.flatnonzero(x.any(axis=0))  # the others' weights stay 0
    rows = x[:, used]
    penalty = np.where(used == COLUMNS["bias"], 1e-6, L2)
    weights = np.zeros(len(used))
    for _ in range(MAX_STEPS):
        share = 1 / (1 + np.exp(-rows @ weights))
        slope = rows.T @ (share - y) + penalty * weights
        if np.abs(slope).max() < TOLERANCE:
            break
        curve = (rows * (share * (1 - share))[:, None]).T @ rows + np.diag(penalty)
        weights -= np.linalg.solve(curve, slope)
    else:
        raise RuntimeError(f"no minimum in {MAX_STEPS} steps")
    found = np.zeros(x.shape[1])
    found[used] = weights
    return found


def out_of_fold(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Scores [N] by regressions that have not seen the row."""
    scores = np.zeros(len(y))
    for fold in range(NUM_FOLDS):
        held_out = np.arange(len(y)) % NUM_FOLDS == fold
        scores[held_out] = x[held_out] @ fit(x[~held_out], y[~held_out])
    return scores


def auc(scores: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Area under the ROC curve, ties counted as halves, and its standard error; NaN if all are alike."""
    high, low = scores[y], scores[~y]
    if not len(high) or not len(low):
        return math.nan, math.nan
    area = float(np.mean((high[:, None] > low[None]) + 0.5 * (high[:, None] == low[None])))
    q1, q2 = area / (2 - area), 2 * area**2 / (1 + area)
    variance = (area * (1 - area) + (len(high) - 1) * (q1 - area**2) + (len(low) - 1) * (q2 - area**2)) / (len(high) * len(low))
    return area, math.sqrt(max(0.0, variance))


def doubts(outcomes: Sequence[Outcome], num_judged: int) -> np.ndarray:
    """[N], the largest entropy among the first tokens of the small decoder's answer."""
    return np.array([max(each.attempts["small"].entropies[:num_judged]) for each in outcomes])


def sign_test(num_mended: int, num_spoilt: int) -> float:
    """Probability of so many mended or more if a second answer were as likely to spoil as to mend (one-sided, exact)."""
    total = num_mended + num_spoilt
    return sum(math.comb(total, count) for count in range(num_mended, total + 1)) / 2**total


def best_escalation(doubt: np.ndarray, gain: np.ndarray, worth: float = WORTH) -> tuple[float | None, float]:
    """The entropy above which a second answer mends most, each at the price of `worth`, and what that comes to.

    None if it never does, or no more than chance explains: for equally good decoders, too, there is always a threshold that looks good.
    """
    order = np.argsort(-doubt, kind="stable")
    net = np.cumsum(gain[order] - worth)[: int(MAX_ESCALATED * len(doubt))]
    is_step = doubt[order][: len(net)] > doubt[order][1 : len(net) + 1]  # equal entropies go together
    net = np.where(is_step, net, -np.inf)
    last = int(np.argmax(net))
    above = gain[order[: last + 1]]
    if net[last] <= 0 or sign_test(int((above > 0).sum()), int((above < 0).sum())) > MAX_CHANCE:
        return None, 0.0
    return float((doubt[order[last]] + doubt[order[last + 1]]) / 2), float(net[last])


def train(outcomes: Sequence[Outcome], worth: float = WORTH) -> tuple[dict[str, Any], dict[str, Any]]:
    """`router.json`, and the report."""
    x, gain = matrix(outcomes), gains(outcomes)
    is_mended = gain > 0
    weights = fit(x, is_mended.astype(float))
    area, error = auc(out_of_fold(x, is_mended.astype(float)), is_mended)
    escalations = {num: best_escalation(doubts(outcomes, num), gain, worth) for num in range(1, NUM_ENTROPIES + 1)}
    num_judged = max(escalations, key=lambda num: (round(escalations[num][1], 6), -num))  # the fewest among equals
    kept = {name: round(float(weights[column]), 4) for name, column in COLUMNS.items() if abs(weights[column]) >= 5e-5}
    router = {"weights": kept, "threshold": worth, "escalate_above": escalations[num_judged][0], "num_judged": num_judged}
    shares = 1 / (1 + np.exp(-x @ weights))
    is_wrong = np.array([not each.attempts["small"].right for each in outcomes])
    report = {
        "script": "train_router",
        "items": len(outcomes),
        "only_large_right": int(is_mended.sum()),
        "only_small_right": int((gain < 0).sum()),
        "classifier_auc": round(area, 3),
        "classifier_auc_95": [round(max(0.0, area - 1.96 * error), 3), round(min(1.0, area + 1.96 * error), 3)],
        "share_to_large": round(float((shares >= worth).mean()), 4),
        "entropy_auc_small_wrong": {num: round(auc(doubts(outcomes, num), is_wrong)[0], 3) for num in escalations},
        "entropy_auc_mended": {num: round(auc(doubts(outcomes, num), is_mended)[0], 3) for num in escalations},
        "escalate_above": router["escalate_above"],
        "num_judged": num_judged,
        "share_escalated": 0.0
        if router["escalate_above"] is None
        else round(float((doubts(outcomes, num_judged) > router["escalate_above"]).mean()), 4),
    }
    return router, report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("answers", type=Path, nargs="?", default=ANSWERS)
    parser.add_argument("--out", type=Path, default=BUNDLED / FILE)
    parser.add_argument("--worth", type=float, default=WORTH, help="answers mended for each computed by the large decoder instead")
    options = parser.parse_args()
    router, report = train(read_outcomes(options.answers), options.worth)
    options.out.write_text(json.dumps(router, indent=1, sort_keys=True) + "\n")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
