"""The sounds that are no speech, drawn with numpy: every call sounds different, every kind keeps its character.

Pure and seeded by the generator handed in.  Waveforms are float32, mono, 16 kHz, with a peak of 1.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from scripts.tiny.world import SAMPLE_RATE, SOUNDS


def make_sound(name: str, rng: np.random.Generator) -> np.ndarray:
    """`name` is one of SOUNDS; 0.6 to 3.5 s, without leading or trailing silence."""
    num_samples = int(SAMPLE_RATE * rng.uniform(0.6, 3.5))
    wave = _MAKERS[name](num_samples, rng)
    return (wave / np.abs(wave).max()).astype(np.float32)


def _seconds(num_samples: int) -> np.ndarray:
    return np.arange(num_samples) / SAMPLE_RATE


def _phase(hertz: np.ndarray) -> np.ndarray:
    """Radians of a tone whose frequency changes from sample to sample."""
    return 2 * np.pi * np.cumsum(hertz) / SAMPLE_RATE


def _noise(num_samples: int, low_hz: float, high_hz: float, rng: np.random.Generator) -> np.ndarray:
    """White noise with soft edges at `low_hz` and `high_hz`."""
    spectrum = np.fft.rfft(rng.standard_normal(num_samples))
    hertz = np.fft.rfftfreq(num_samples, 1 / SAMPLE_RATE)
    spectrum *= 1 / (1 + (low_hz / np.maximum(hertz, 1)) ** 4) / (1 + (hertz / high_hz) ** 4)
    wave: np.ndarray = np.fft.irfft(spectrum, num_samples)
    return wave / wave.std()


def _onsets(num_samples: int, gap_s: tuple[float, float], jitter: float, rng: np.random.Generator) -> list[int]:
    """Sample indices of strikes at an even beat; the first is 0."""
    gap = SAMPLE_RATE * rng.uniform(*gap_s)
    beats = [0.0]
    while beats[-1] < num_samples:
        beats.append(beats[-1] + gap * (1 + jitter * rng.uniform(-1, 1)))
    return [int(beat) for beat in beats[:-1]]


def _bell(num_samples: int, rng: np.random.Generator) -> np.ndarray:
    pitch_hz = np.exp(rng.uniform(np.log(280), np.log(1300)))
    ratios = np.array([0.5, 1.0, 1.19, 1.5, 2.0, 2.74, 3.76, 5.4]) * rng.uniform(0.985, 1.015, 8)
    loudness = np.array([0.4, 1.0, 0.6, 0.4, 0.8, 0.5, 0.3, 0.2]) * rng.uniform(0.4, 1.3, 8)
    decay_s = rng.uniform(0.25, 1.6) / np.sqrt(ratios)
    wave = np.zeros(num_samples)
    for onset in _onsets(num_samples, (0.25, 1.4), 0.03, rng):
        t = _seconds(num_samples - onset)
        for ratio, level, decay in zip(ratios, loudness, decay_s, strict=True):
            if pitch_hz * ratio < 7000:
                wave[onset:] += level * np.exp(-t / decay) * np.sin(2 * np.pi * pitch_hz * ratio * t)
    return wave


def _siren(num_samples: int, rng: np.random.Generator) -> np.ndarray:
    low_hz = rng.uniform(350, 750)
    high_hz = low_hz * rng.uniform(1.5, 2.4)
    turn = _seconds(num_samples) * rng.uniform(0.4, 3.0) + rng.uniform()
    shape = rng.choice(("wail", "yelp", "two-tone"))
    if shape == "wail":
        height = 0.5 - 0.5 * np.cos(2 * np.pi * turn)
    elif shape == "yelp":
        height = turn % 1.0
    else:
        height = (turn % 1.0 > 0.5).astype(float)
    phase = _phase(low_hz + (high_hz - low_hz) * height)
    overtones = rng.uniform(0.1, 0.6, 3)
    return np.sin(phase) + sum(level * np.sin((i + 2) * phase) for i, level in enumerate(overtones))


def _whistle(num_samples: int, rng: np.random.Generator) -> np.ndarray:
    t = _seconds(num_samples)
    pitch_hz = rng.uniform(1900, 3600)
    trill_hz = rng.uniform(14, 38)
    depth = rng.choice((0.0, rng.uniform(0.3, 0.8)))
    trill = np.sin(2 * np.pi * trill_hz * t)
    slide = rng.uniform(-0.12, 0.12) * t / t[-1]
    wave = np.sin(_phase(pitch_hz * (1 + slide + 0.03 * depth * trill))) * (1 - depth * (0.5 + 0.5 * trill))
    wave += rng.uniform(0.01, 0.05) * _noise(num_samples, 1500, 5000, rng)
    blow = np.ones(num_samples)
    for onset in _onsets(num_samples, (0.4, 2.5), 0.1, rng)[1:]:
        rest = slice(onset, onset + int(SAMPLE_RATE * rng.uniform(0.05, 0.2)))
        blow[rest] = 0.0
    edge = np.hanning(int(0.04 * SAMPLE_RATE))
    return wave * np.convolve(blow, edge / edge.sum(), "same")


def _drum(num_samples: int, rng: np.random.Generator) -> np.ndarray:
    pitch_hz, decay_s, snare = rng.uniform(60, 190), rng.uniform(0.05, 0.22), rng.uniform(0.05, 0.7)
    wave = np.zeros(num_samples)
    rattle = _noise(num_samples, 400, rng.uniform(2000, 6000), rng)
    for onset in _onsets(num_samples, (0.13, 0.5), 0.08, rng):
        t = _seconds(num_samples - onset)
        skin = np.exp(-t / decay_s) * np.sin(_phase(pitch_hz * (1 + 1.5 * np.exp(-t / 0.02))))
        wires = snare * np.exp(-t / (decay_s * 0.6)) * rattle[: len(t)] * 0.5
        wave[onset:] += rng.uniform(0.6, 1.0) * (skin + wires)
    return wave


def _rain(num_samples: int, rng: np.random.Generator) -> np.ndarray:
    wave = _noise(num_samples, rng.uniform(200, 900), rng.uniform(3500, 9000), rng)
    wave *= 1 + 0.2 * np.sin(2 * np.pi * rng.uniform(0.2, 1.0) * _seconds(num_samples) + rng.uniform(0, 6))
    for onset in rng.integers(0, num_samples, int(num_samples / SAMPLE_RATE * rng.uniform(15, 90))):
        t = _seconds(min(num_samples - onset, 400))
        wave[onset : onset + 400] += rng.uniform(0.3, 2) * np.exp(-t / 0.003) * np.sin(2 * np.pi * rng.uniform(900, 5000) * t)
    return wave


def _buzzer(num_samples: int, rng: np.random.Generator) -> np.ndarray:
    t = _seconds(num_samples)
    phase = rng.uniform(85, 260) * t
    saw, square = 2 * (phase % 1.0) - 1, np.sign(np.sin(2 * np.pi * phase))
    wave = saw + rng.uniform(0, 1) * (square - saw)
    wave *= 1 + rng.uniform(0, 0.5) * np.sin(2 * np.pi * rng.uniform(20, 60) * t)
    if rng.random() < 0.5:
        beat_s = rng.uniform(0.2, 0.7)
        wave *= (t % beat_s) / beat_s < rng.uniform(0.55, 0.85)
    return wave


_MAKERS: dict[str, Callable[[int, np.random.Generator], np.ndarray]] = {
    "bell": _bell,
    "siren": _siren,
    "whistle": _whistle,
    "drum": _drum,
    "rain": _rain,
    "buzzer": _buzzer,
}
assert set(_MAKERS) == set(SOUNDS)
