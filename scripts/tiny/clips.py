"""Clips as a microphone might hear them: silences, distance, room, noise, telephone lines; and windows full of them to learn from.

Pure but for `speak`; seeded by the generator handed in.
"""

from __future__ import annotations

import random

import numpy as np
import soxr

from scripts.tiny.speak import Clip, Span, join, place, speak, spoken_questions
from scripts.tiny.world import SAMPLE_RATE, SOUNDS, SPOKEN_WORDS, WINDOW_S, Utterance

_QUESTIONS = spoken_questions()
# A window and an echo's tail, and a product of small primes.
_FFT_SAMPLES = 90_000
_HERTZ = np.fft.rfftfreq(_FFT_SAMPLES, 1 / SAMPLE_RATE).astype(np.float32)
_OCTAVES = np.log2(np.maximum(_HERTZ, 60) / 1000)  # above 1 kHz


def sample_utterance(rng: random.Random) -> Utterance:
    draw = rng.random()
    if draw < 0.33:
        return Utterance((rng.choice(SPOKEN_WORDS),))
    if draw < 0.36:
        return Utterance(rng.choice(_QUESTIONS[:2]))
    if draw < 0.80:
        return Utterance(rng.choice(_QUESTIONS[2:]))
    return Utterance(sound=rng.choice(SOUNDS))


def make_clip(utterance: Utterance, rng: random.Random, *, held_out: bool = False) -> Clip:
    """One utterance as a user would send it, 0.6 to 5 s."""
    return _dress(speak(utterance, rng, held_out=held_out), rng)


def _dress(clip: Clip, rng: random.Random) -> Clip:
    clip = _change_speed(clip, rng)
    spare_s = WINDOW_S - len(clip.waveform) / SAMPLE_RATE
    before_s = rng.uniform(0.02, 0.9)
    after_s = max(rng.uniform(0.02, 0.9), 0.6 + 1 / SAMPLE_RATE - before_s - len(clip.waveform) / SAMPLE_RATE)
    shrink = min(1.0, max(spare_s, 0.0) / (before_s + after_s))
    return _distort(place(clip, before_s * shrink, after_s * shrink), rng)


class Pool:
    """Bare clips to dress again and again: speaking costs more than distorting.  Most are reused, a few are always new."""

    def __init__(self, capacity: int = 6000, fresh: float = 0.1) -> None:
        self._capacity, self._fresh = capacity, fresh
        self._clips: list[Clip] = []

    def draw(self, rng: random.Random) -> Clip:
        if rng.random() >= max(self._fresh, 1 - len(self._clips) / self._capacity):
            return rng.choice(self._clips)
        clip = speak(sample_utterance(rng), rng)
        if len(self._clips) < self._capacity:
            self._clips.append(clip)
        else:
            self._clips[rng.randrange(self._capacity)] = clip
        return clip


def make_window(pool: Pool, rng: random.Random, alone: float) -> Clip:
    """What fits in one window, at least one utterance; `alone` is the chance that it is just one.

    Several utterances behind one another teach several times as much for the same price.
    """
    if rng.random() < alone:
        return _dress(pool.draw(rng), rng)
    clips: list[Clip] = []
    spare = int(WINDOW_S * SAMPLE_RATE)
    while True:
        clip = _change_speed(pool.draw(rng), rng)
        clip = place(clip, rng.uniform(0.05, 0.6), rng.uniform(0.02, 0.2))
        spare -= len(clip.waveform)
        if spare < 0:
            break
        clips.append(Clip(clip.waveform * np.float32(10 ** (rng.uniform(-8, 0) / 20)), clip.spans))
    return _distort(join(clips), rng) if clips else _dress(pool.draw(rng), rng)


def _change_speed(clip: Clip, rng: random.Random) -> Clip:
    """Faster and higher, or slower and lower, by up to a tenth."""
    speed = rng.uniform(0.9, 1.1)
    # Not by linear interpolation, which adds whistles of its own.
    waveform = soxr.resample(clip.waveform, SAMPLE_RATE * speed, SAMPLE_RATE, "LQ")
    num_samples = len(waveform)
    spans = tuple(Span(s.label, min(int(s.start / speed), num_samples), min(int(s.stop / speed), num_samples)) for s in clip.spans)
    return Clip(waveform, spans)


def _distort(clip: Clip, rng: random.Random) -> Clip:
    """Tilt, resonances, low-pass and room in one product of spectra; then noise, clipping and gain."""
    noise = np.random.default_rng(rng.randrange(2**63))
    n = len(clip.waveform)
    gain_db = rng.uniform(-4, 4) * _OCTAVES
    for _ in range(rng.randrange(3)):
        width = rng.uniform(0.3, 1.2)
        gain_db += rng.uniform(-9, 6) * np.exp(-(((_OCTAVES - rng.uniform(-2.5, 2.8)) / width) ** 2))
    response = 10 ** (np.clip(gain_db, -30, 20) / 20)
    if rng.random() < 0.2:  # a telephone, or a low bit rate
        response = response / (1 + (_HERTZ / rng.uniform(3400, 6000)) ** 12)
    spectrum = np.fft.rfft(clip.waveform, _FFT_SAMPLES) * response
    if rng.random() < 0.35:
        spectrum *= np.fft.rfft(_room(rng, noise), _FFT_SAMPLES)
    waveform = np.fft.irfft(spectrum, _FFT_SAMPLES)[:n]
    waveform /= np.abs(waveform).max() + 1e-9
    waveform += _hiss(n, rng, noise) * waveform.std()
    if rng.random() < 0.1:
        waveform = np.tanh(waveform * rng.uniform(1.5, 4))
    peak = 10 ** (rng.uniform(-24, -0.5) / 20)
    return Clip((waveform * (peak / np.abs(waveform).max())).astype(np.float32), clip.spans)


def _room(rng: random.Random, noise: np.random.Generator) -> np.ndarray:
    """The impulse response of a small room: the direct sound and a tail that decays within a quarter of a second."""
    t = np.arange(SAMPLE_RATE // 4) / SAMPLE_RATE
    tail = noise.standard_normal(len(t)) * np.exp(-t / rng.uniform(0.01, 0.06))
    tail *= rng.uniform(0.1, 0.7) / np.sqrt((tail**2).sum())
    tail[0] = 1.0
    return tail.astype(np.float32)


def _hiss(num_samples: int, rng: random.Random, noise: np.random.Generator) -> np.ndarray:
    """White to brownish noise, 10 to 60 dB below what it is added to."""
    wave = noise.standard_normal(num_samples, np.float32)
    if rng.random() < 0.5:
        wave = np.convolve(wave, np.exp(-np.arange(12, dtype=np.float32) / rng.uniform(0.5, 4)), "same")
    return wave / wave.std() * 10 ** (-rng.uniform(12, 60) / 20)
