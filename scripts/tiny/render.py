"""Draw a `Scene`: the picture, and for every patch what it shows.

Numpy and Pillow only.  A picture depends on its scene alone (every choice comes from `texture_seed`), so equal scenes give equal
bytes; `augment` adds the wear that pictures from outside bring (light, blur, JPEG, a detour through another size).
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from scripts.tiny.world import COLORS, GRID, IMAGE_SIZE, KINDS, PATCH_SIZE, Scene, Thing

FONT_PATH = "/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf"
FONT_SIZE = 109  # the only bitmap size the font holds
MIN_COVERAGE = 0.35  # share of a patch a thing must cover to own it
KIND_INDEX = {kind: i for i, kind in enumerate(KINDS, start=1)}  # 0 is background
_MARGIN = 10  # pixels around a cached sprite; room for its rim
_RIM_WIDTHS = (0, 2, 4)  # pixels at the sprite's own size


@dataclass(frozen=True, slots=True)
class Rendered:
    """One picture and its truth, patch by patch."""

    image: np.ndarray  # uint8 [336, 336, 3]
    classes: np.ndarray  # int8 [24, 24]; 0 = background, else KIND_INDEX
    offsets: np.ndarray  # float32 [24, 24, 2]; x, y from the patch's middle to its thing's centre, in patches; 0 on background
    centers: np.ndarray  # bool [24, 24]; exactly one patch of each thing: the one it owns nearest to its centre
    cells: np.ndarray  # int8 [24, 24]; index into CELLS of the patch's thing; -1 on background


@dataclass(frozen=True, slots=True)
class _Sprite:
    image: Image.Image  # RGBA with _MARGIN transparent pixels on every side
    outline: np.ndarray  # float32 [N, 2]; x, y of the border pixels, relative to the image's middle


def render(scene: Scene, *, augment: bool = False) -> Rendered:
    rng = np.random.default_rng(scene.texture_seed)
    canvas = _background(rng, scene.background)
    owner = np.full((IMAGE_SIZE, IMAGE_SIZE), -1, np.int8)
    for index, thing in enumerate(scene.things):
        _draw(rng, canvas, owner, index, thing)
    if augment:
        canvas = _wear(rng, canvas)
    return Rendered(np.asarray(canvas), *_truth(scene, owner))


# ----------------------------------------------------------------------------------------------------------------- background


def _background(rng: np.random.Generator, name: str) -> Image.Image:
    """336 x 336: up to 256 close shades of one named colour, as a palette picture turned to RGB."""
    base = np.array(COLORS[name]) + rng.normal(0, 6, 3)
    shade = np.zeros((IMAGE_SIZE, IMAGE_SIZE), np.float32)
    for i in rng.choice(len(_PATTERNS), size=rng.integers(0, 3), replace=False):
        shade += np.float32(rng.uniform(0.3, 1.0)) * _PATTERNS[i](rng)
    if rng.random() < 0.5:
        shade += np.float32(rng.uniform(0.1, 0.5)) * _grain(rng)
    tint = rng.uniform(0.5, 1.0, 3) * rng.uniform(6, 24)
    palette = base + np.linspace(-2, 2, 256)[:, None] * tint
    index = np.clip(shade * np.float32(64) + np.float32(128), 0, 255).astype(np.uint8)
    image = Image.fromarray(index).convert("P")
    image.putpalette(np.clip(palette, 0, 255).astype(np.uint8).tobytes())
    return image.convert("RGB")


def _ramp(rng: np.random.Generator) -> np.ndarray:
    """Distance along a random direction, [-1, 1] from edge to edge."""
    angle = rng.uniform(0, 2 * math.pi)
    axis = np.linspace(-1, 1, IMAGE_SIZE, dtype=np.float32)
    return (axis * math.cos(angle))[None, :] + (axis * math.sin(angle))[:, None]


def _stripes(rng: np.random.Generator) -> np.ndarray:
    wave: np.ndarray = np.sin(_ramp(rng) * rng.uniform(8, 60))
    return np.sign(wave) if rng.random() < 0.5 else wave


def _checks(rng: np.random.Generator) -> np.ndarray:
    square = rng.integers(10, 60)
    index = np.arange(IMAGE_SIZE) // square
    return ((index[:, None] + index[None, :]) % 2 * 2 - 1).astype(np.float32)


def _vignette(rng: np.random.Generator) -> np.ndarray:
    x, y = rng.uniform(-0.5, 0.5, 2)
    axis = np.linspace(-1, 1, IMAGE_SIZE, dtype=np.float32)
    return (0.6 - (axis - x)[None, :] ** 2 - (axis - y)[:, None] ** 2) * (1 if rng.random() < 0.8 else -1)


def _blobs(rng: np.random.Generator) -> np.ndarray:
    side = rng.integers(3, 24)
    coarse = Image.fromarray(rng.normal(0, 0.7, (side, side)).astype(np.float32))
    return np.asarray(coarse.resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BICUBIC))


def _grain(rng: np.random.Generator) -> np.ndarray:
    return rng.standard_normal((IMAGE_SIZE, IMAGE_SIZE), np.float32)


_PATTERNS: tuple[Callable[[np.random.Generator], np.ndarray], ...] = (_ramp, _stripes, _checks, _vignette, _blobs)


# --------------------------------------------------------------------------------------------------------------------- things


@cache
def _glyph(kind: str) -> Image.Image:
    font = ImageFont.truetype(FONT_PATH, FONT_SIZE)
    glyph = Image.new("RGBA", (180, 180))
    ImageDraw.Draw(glyph).text((20, 20), KINDS[kind], font=font, embedded_color=True)
    box = glyph.getchannel("A").getbbox()
    assert box is not None, f"the font draws nothing for {kind}"
    left, top, right, bottom = box
    return glyph.crop((left - _MARGIN, top - _MARGIN, right + _MARGIN, bottom + _MARGIN))


@cache
def _sprite(kind: str, rim_width: int, is_light: bool) -> _Sprite:
    image = _glyph(kind)
    alpha = image.getchannel("A")
    if rim_width:
        rim = alpha.filter(ImageFilter.MaxFilter(2 * rim_width + 1)).filter(ImageFilter.GaussianBlur(0.7))
        backing = Image.new("RGBA", image.size, (250, 250, 250, 0) if is_light else (40, 40, 40, 0))
        backing.putalpha(rim)
        image = Image.alpha_composite(backing, image)
    solid = np.asarray(image.getchannel("A")) > 128
    inner = solid[1:-1, :-2] & solid[1:-1, 2:] & solid[:-2, 1:-1] & solid[2:, 1:-1]
    rows, columns = np.nonzero(solid[1:-1, 1:-1] & ~inner)
    outline = np.stack([columns + 1.5 - image.width / 2, rows + 1.5 - image.height / 2], axis=1).astype(np.float32)
    return _Sprite(image.convert("RGBa"), outline)


def _draw(rng: np.random.Generator, canvas: Image.Image, owner: np.ndarray, index: int, thing: Thing) -> None:
    """Paste `thing` so that its drawn outline is centred on `center` and its longer side is `size`; note the pixels it owns."""
    sprite = _sprite(thing.kind, int(rng.choice(_RIM_WIDTHS, p=(0.15, 0.5, 0.35))), bool(rng.random() < 0.8))
    stretch = math.sqrt(thing.aspect)
    cos, sin = math.cos(math.radians(thing.angle)), math.sin(math.radians(thing.angle))
    flip = -1 if thing.mirrored else 1
    forward = np.array([[cos, -sin], [sin, cos]]) @ np.diag([stretch * flip, 1 / stretch])
    drawn = sprite.outline @ forward.T
    low, high = drawn.min(axis=0), drawn.max(axis=0)
    forward *= thing.size / (high - low).max()
    middle = (low + high) / 2 * (thing.size / (high - low).max())

    side = math.ceil(thing.size) + 2
    left, top = (round(v - side / 2) for v in thing.center)
    inverse = np.linalg.inv(forward)
    # A pixel (u, v) of the pasted square shows the sprite's point inverse @ (u + left - x + middle_x, v + top - y + middle_y).
    shift = inverse @ (np.array([left, top]) - thing.center + middle) + np.array(sprite.image.size) / 2
    matrix = (inverse[0, 0], inverse[0, 1], shift[0], inverse[1, 0], inverse[1, 1], shift[1])
    pasted = sprite.image.transform((side, side), Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR).convert("RGBA")
    canvas.paste(pasted, (left, top), pasted)

    x0, y0, x1, y1 = max(left, 0), max(top, 0), min(left + side, IMAGE_SIZE), min(top + side, IMAGE_SIZE)
    solid = np.asarray(pasted.getchannel("A"))[y0 - top : y1 - top, x0 - left : x1 - left] > 128
    owner[y0:y1, x0:x1][solid] = index


# ----------------------------------------------------------------------------------------------------------------------- wear


def _wear(rng: np.random.Generator, image: Image.Image) -> Image.Image:
    if rng.random() < 0.5:
        gain, lift = rng.uniform(0.85, 1.1), rng.uniform(-14, 14)
        table = np.clip((np.arange(256) - 128) * gain + 128 + lift, 0, 255).astype(np.uint8)
        image = image.point(table.tolist() * 3)
    if rng.random() < 0.25:  # a server stretches any picture to its square, so pictures arrive resampled
        width, height = rng.integers(170, 500, 2).tolist()
        image = image.resize((width, height), Image.Resampling.BILINEAR).resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BICUBIC)
    elif rng.random() < 0.2:
        image = image.filter(ImageFilter.GaussianBlur(rng.uniform(0.3, 1.3)))
    if rng.random() < 0.3:
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=int(rng.integers(45, 96)))
        image = Image.open(buffer).convert("RGB")
    return image


# ---------------------------------------------------------------------------------------------------------------------- truth


def _truth(scene: Scene, owner: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    classes = np.zeros((GRID, GRID), np.int8)
    offsets = np.zeros((GRID, GRID, 2), np.float32)
    centers = np.zeros((GRID, GRID), bool)
    cells = np.full((GRID, GRID), -1, np.int8)
    blocks = owner.reshape(GRID, PATCH_SIZE, GRID, PATCH_SIZE)
    middles = np.arange(GRID, dtype=np.float32) + 0.5
    for index, thing in enumerate(scene.things):
        coverage = (blocks == index).mean(axis=(1, 3), dtype=np.float32)
        owned = coverage >= MIN_COVERAGE
        x, y = (v / PATCH_SIZE for v in thing.center)
        to_center = np.stack(np.broadcast_arrays(x - middles[None, :], y - middles[:, None]), axis=-1)
        classes[owned] = KIND_INDEX[thing.kind]
        cells[owned] = thing.cell
        offsets[owned] = to_center[owned]
        distance = np.square(to_center).sum(axis=-1)
        centers.flat[np.argmin(np.where(owned, distance, np.inf))] = True
    return classes, offsets, centers, cells
