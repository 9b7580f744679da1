"""Media as people and attackers really send them, made on the spot: every row of the kind "a file that looks odd" has its maker here.

Pictures show four coloured quarters (`SCENE`), so that a turn, a mirror image or a swapped channel can't go unnoticed; clips hold a
tone that rises, so that another rate or a lost half can't.
"""

from __future__ import annotations

import io
import struct
import zlib
from functools import cache

import numpy as np
import soundfile
from PIL import Image

RED, GREEN, BLUE, YELLOW = (230, 20, 20), (20, 200, 20), (20, 20, 230), (230, 220, 20)
UNDO = {  # what a camera does to the pixels when it writes this orientation
    2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM, 5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90, 7: Image.Transpose.TRANSVERSE, 8: Image.Transpose.ROTATE_270,
}  # fmt: skip

# --- pictures


def scene(width: int = 96, height: int = 64) -> Image.Image:
    """Red, green over blue, yellow."""
    pixels = np.empty((height, width, 3), np.uint8)
    pixels[: height // 2, : width // 2] = RED
    pixels[: height // 2, width // 2 :] = GREEN
    pixels[height // 2 :, : width // 2] = BLUE
    pixels[height // 2 :, width // 2 :] = YELLOW
    return Image.fromarray(pixels)


def save(image: Image.Image, format: str, **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


def oriented(orientation: int, format: str) -> bytes:
    """The scene as a camera held that way stores it, with the EXIF tag that says so.  PNG and WebP are lossless."""
    image = scene().transpose(UNDO[orientation]) if orientation in UNDO else scene()
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"JPEG": {"quality": 95, "subsampling": 0}, "MPO": {"quality": 95, "subsampling": 0}, "WEBP": {"lossless": True}, "PNG": {}}
    if format == "MPO":
        return save(image, "MPO", exif=exif, save_all=True, append_images=[scene(32, 32)], **options["MPO"])
    return save(image, format, exif=exif, **options[format])


def png(width: int, height: int, *, bits: int, colour_type: int, rows: bytes, chunks: bytes = b"") -> bytes:
    """A PNG from raw filtered rows: for kinds Pillow can't write, and for sizes nobody should decode."""
    header = struct.pack(">IIBBBBB", width, height, bits, colour_type, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header) + chunks + png_chunk(b"IDAT", zlib.compress(rows, 1)) + png_chunk(b"IEND", b"")


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_16_bit_grey(value: int, clear: int | None = None) -> bytes:
    row = b"\0" + struct.pack(">H", value) * 8
    chunks = png_chunk(b"tRNS", struct.pack(">H", clear)) if clear is not None else b""
    return png(8, 8, bits=16, colour_type=0, rows=row * 8, chunks=chunks)


def png_16_bit_rgb(red: int, green: int, blue: int) -> bytes:
    return png(8, 8, bits=16, colour_type=2, rows=(b"\0" + struct.pack(">HHH", red, green, blue) * 8) * 8)


def png_bomb(side: int = 20_000) -> bytes:
    """One bit a pixel, all zero: a few hundred KB that unpack to 50 MB, 1.6 GB as RGB."""
    return png(side, side, bits=1, colour_type=0, rows=bytes((1 + side // 8) * side))


def png_with_unpacking_profile(num_bytes: int) -> bytes:
    """A small picture whose colour profile is packed well."""
    return png(8, 8, bits=8, colour_type=0, rows=bytes(9 * 8), chunks=png_chunk(b"iCCP", b"p\0\0" + zlib.compress(bytes(num_bytes), 9)))


def png_with_unpacking_text(num_bytes: int) -> bytes:
    """The same with a comment."""
    return png(8, 8, bits=8, colour_type=0, rows=bytes(9 * 8), chunks=png_chunk(b"zTXt", b"c\0\0" + zlib.compress(bytes(num_bytes), 9)))


def palette_with_transparency() -> bytes:
    """The left half is a transparent palette entry that would be black."""
    image = Image.new("P", (32, 32), 1)
    image.putpalette([0, 0, 0, *RED])
    image.paste(0, (0, 0, 16, 32))
    return save(image, "PNG", transparency=0)


def invisible_colours() -> bytes:
    """Alpha 0 over bright red in the left half: dropping alpha would show it."""
    image = Image.new("RGBA", (32, 32), (*BLUE, 255))
    image.paste((*RED, 0), (0, 0, 16, 32))
    return save(image, "PNG")


def cmyk_jpeg(*, adobe: bool) -> bytes:
    data = save(Image.new("RGB", (32, 32), RED).convert("CMYK"), "JPEG", quality=95)
    return data if adobe else without_segment(data, 0xEE)


def without_segment(data: bytes, marker: int) -> bytes:
    """A JPEG less every segment with that marker before the first scan."""
    out, position = bytearray(data[:2]), 2
    while data[position + 1] != 0xDA:
        (length,) = struct.unpack_from(">H", data, position + 2)
        if data[position + 1] != marker:
            out += data[position : position + 2 + length]
        position += 2 + length
    return bytes(out + data[position:])


def progressive_jpeg() -> bytes:
    return save(scene(), "JPEG", progressive=True, quality=95, subsampling=0)


def scan_bomb(num_scans: int) -> bytes:
    """A progressive JPEG whose last scan is sent over and over."""
    data = save(scene(640, 480), "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * num_scans + data[-2:]


def with_sof(data: bytes, marker: int, bits: int = 8) -> bytes:
    """A JPEG that says it is of another coding process."""
    at = data.index(b"\xff\xc0")
    return data[:at] + bytes((0xFF, marker)) + data[at + 2 : at + 4] + bytes((bits,)) + data[at + 5 :]


def with_size(data: bytes, width: int, height: int) -> bytes:
    """A baseline JPEG that says it is of another size."""
    at = data.index(b"\xff\xc0")
    return data[: at + 5] + struct.pack(">HH", height, width) + data[at + 9 :]


def animated(format: str) -> bytes:
    """First the scene, then two frames of another colour."""
    others = [Image.new("RGB", (96, 64), RED), Image.new("RGB", (96, 64), BLUE)]
    options = {"WEBP": {"lossless": True}, "PNG": {}, "GIF": {}}[format]
    return save(scene(), format, save_all=True, append_images=others, duration=100, **options)


def webp_canvas_bomb() -> bytes:
    """46 bytes with a canvas of 16384 x 16384."""
    canvas = struct.pack("<I", 0x02) + (16_383).to_bytes(3, "little") * 2
    body = b"WEBPVP8X" + struct.pack("<I", 10) + canvas + b"ANIM" + struct.pack("<IIH", 6, 0, 0)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def gif_with_frame_beyond_screen(side: int = 60_000) -> bytes:
    """A 10 x 10 screen whose only frame is enormous."""
    screen = b"GIF89a" + struct.pack("<HHBBB", 10, 10, 0x80, 0, 0) + bytes(6)
    return screen + b"\x2c" + struct.pack("<HHHHB", 0, 0, side, side, 0) + b"\x02\x02\x4c\x01\x00;"


def linear_profile() -> bytes:
    """An ICC profile with sRGB's primaries and no gamma: 50 % grey in it is 188 in sRGB."""

    def xyz(*values: float) -> bytes:
        return b"XYZ \0\0\0\0" + b"".join(struct.pack(">i", round(value * 65536)) for value in values)

    curve = b"curv\0\0\0\0" + struct.pack(">I", 0)
    tags = {
        b"desc": b"desc\0\0\0\0" + struct.pack(">I", 7) + b"linear\0" + bytes(78),
        b"wtpt": xyz(0.9642, 1.0, 0.8249), b"rXYZ": xyz(0.4361, 0.2225, 0.0139), b"gXYZ": xyz(0.3851, 0.7169, 0.0971),
        b"bXYZ": xyz(0.1431, 0.0606, 0.7141), b"rTRC": curve, b"gTRC": curve, b"bTRC": curve,
    }  # fmt: skip
    table, body, offset = struct.pack(">I", len(tags)), b"", 128 + 4 + 12 * len(tags)
    for name, data in tags.items():
        table += name + struct.pack(">II", offset + len(body), len(data))
        body += data + bytes(-len(data) % 4)
    header = struct.pack(">I4sI4s4s4s12s4s", offset + len(body), b"none", 0x02100000, b"mntr", b"RGB ", b"XYZ ", bytes(12), b"acsp")
    header += bytes(28) + struct.pack(">iii", 63190, 65536, 54061)
    return header.ljust(128, b"\0") + table + body


OTHER_PICTURES = {  # first bytes of what is not on the allow-list -> the name it is refused by
    b"\0\0\0\x18ftypheic\0\0\0\0mif1heic": "heic",
    b"\0\0\0\x18ftypmif1\0\0\0\0mif1heic": "heic",
    b"\0\0\0\x1cftypavif\0\0\0\0avifmif1miaf": "avif",
    b"<svg xmlns='http://www.w3.org/2000/svg'/>": "svg",
    b"<?xml version='1.0'?><!DOCTYPE svg><svg/>": "svg",
    b"BM" + bytes(60): "bmp",
    b"II*\0" + bytes(60): "tiff",
    b"MM\0*" + bytes(60): "tiff",
    b"%!PS-Adobe-3.0 EPSF-3.0": "postscript",
    b"8BPS" + bytes(60): "psd",
    b"\0\0\0\x0cjP  \r\n\x87\n": "jpeg2000",
    b"SIMPLE  =                    T": "fits",
    b"RIFF\x24\0\0\0WAVEfmt ": "audio/wav",
    b"OggS" + bytes(60): "audio/ogg",
    b"\x1aE\xdf\xa3" + bytes(60): "webm",
    b"%PDF-1.7": "pdf",
}


@cache
def odd_pictures() -> dict[str, bytes]:
    """Every picture that must decode to something, by a name for the test's id."""
    return {
        "jpeg": save(scene(), "JPEG"),
        "progressive": progressive_jpeg(),
        "png": save(scene(), "PNG"),
        "gif": save(scene(), "GIF"),
        "webp": save(scene(), "WEBP"),
        "lossless webp": save(scene(), "WEBP", lossless=True),
        "1x1": save(scene(2, 2).crop((0, 0, 1, 1)), "PNG"),
        "one bit": save(scene().convert("1"), "PNG"),
        "grey": save(scene().convert("L"), "PNG"),
        "grey jpeg": save(scene().convert("L"), "JPEG"),
        "grey with alpha": save(scene().convert("LA"), "PNG"),
        "palette": save(scene().convert("P"), "PNG"),
        "palette with tRNS": palette_with_transparency(),
        "alpha 0": invisible_colours(),
        "webp with alpha": save(scene().convert("RGBA"), "WEBP"),
        "16-bit grey": png_16_bit_grey(40_000),
        "16-bit rgb": png_16_bit_rgb(1, 2, 65_535),
        "cmyk": cmyk_jpeg(adobe=True),
        "cmyk without Adobe": cmyk_jpeg(adobe=False),
        "animated gif": animated("GIF"),
        "apng": animated("PNG"),
        "animated webp": animated("WEBP"),
        "mpo": oriented(6, "MPO"),
        "linear icc": save(scene(), "PNG", icc_profile=linear_profile()),
        "broken icc": save(scene(), "PNG", icc_profile=b"not a profile"),
        "4:1:1": save(scene(), "JPEG", subsampling="4:1:1"),
        "strip": save(scene(400, 2), "PNG"),
    }


# --- clips

RATE = 16_000


def tone(num_samples: int = RATE, rate: int = RATE) -> np.ndarray:
    """float64 [n], half of full scale, rising from 300 to 900 Hz in each second."""
    t = np.arange(num_samples) / rate
    return 0.5 * np.sin(2 * np.pi * (300 * t + 300 * t * t))


def clip(samples: np.ndarray, rate: int, format: str, subtype: str) -> bytes:
    out = io.BytesIO()
    soundfile.write(out, samples, rate, format=format, subtype=subtype)
    return out.getvalue()


def wav(samples: np.ndarray, rate: int = RATE, subtype: str = "PCM_16") -> bytes:
    return clip(samples, rate, "WAV", subtype)


def raw_wav(
    data: bytes,
    *,
    code: int = 1,
    bits: int = 16,
    rate: int = RATE,
    channels: int = 1,
    data_size: int | None = None,
    riff_size: int | None = None,
) -> bytes:
    """A WAV by hand, for sizes that lie and samples soundfile would not write."""
    block = channels * bits // 8
    fmt = struct.pack("<HHIIHH", code, channels, rate, min(rate * block, 2**32 - 1), block, bits)
    size = len(data) if data_size is None else data_size
    body = b"WAVEfmt " + struct.pack("<I", len(fmt)) + fmt + b"data" + struct.pack("<I", size) + data
    return b"RIFF" + struct.pack("<I", len(body) if riff_size is None else riff_size) + body


def wav_of_floats(samples: list[float]) -> bytes:
    return raw_wav(np.array(samples, "<f4").tobytes(), code=3, bits=32)


def mp3_without_length(num_samples: int = 20 * RATE) -> bytes:
    """Variable bit rate and no Xing frame: the decoder can only guess the length from the first frames."""
    out = io.BytesIO()
    quiet = np.concatenate([tone(num_samples // 2) * 0.01, tone(num_samples - num_samples // 2)])
    soundfile.write(out, quiet, RATE, format="MP3", subtype="MPEG_LAYER_III", bitrate_mode="VARIABLE", compression_level=0.5)
    data = out.getvalue()
    return data[data.index(data[:2], 20) :]


def flac_with_claimed_frames(num_frames: int) -> bytes:
    """A second of FLAC whose STREAMINFO claims another length (36 bits)."""
    data = bytearray(clip(tone(), RATE, "FLAC", "PCM_16"))
    data[21] = data[21] & 0xF0 | num_frames >> 32 & 0x0F
    data[22:26] = (num_frames & 0xFFFFFFFF).to_bytes(4, "big")
    return bytes(data)


def silence_bomb(seconds: int = 300) -> bytes:
    """Five minutes of silence in a few KB."""
    out = io.BytesIO()
    with soundfile.SoundFile(out, "w", 8_000, 1, format="OGG", subtype="VORBIS") as file:
        for _ in range(seconds // 10):
            file.write(np.zeros(80_000, np.float32))
    return out.getvalue()


OTHER_CLIPS = {  # first bytes of what is not on the allow-list -> the name it is refused by
    b"\x1aE\xdf\xa3\x01\0\0\0\0\0\0\x1fB\x86": "webm",
    b"\0\0\0\x20ftypM4A \0\0\0\0": "m4a",
    b"\0\0\0\x20ftypisom\0\0\0\0": "mp4",
    b"\0\0\0\x18ftyp3gp4\0\0\0\0": "3gp",
    b"#!AMR\n\x3c": "amr",
    b"\xff\xf1\x50\x80\x02\x1f": "aac",
    b"\xff\xfd\x90\x04": "layer I or II",
    b"FORM\0\0\0\x2eAIFF": "aiff",
    b".snd\0\0\0\x18": "au",
    b"caff\0\x01": "caf",
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff\xe0": "image/jpeg",
}


@cache
def odd_clips() -> dict[str, tuple[bytes, int]]:
    """Every clip that must decode, with the number of samples at 16 kHz it must give."""
    stereo = np.stack([tone(), tone()], axis=1)
    odd_data = (tone() * 32767).astype("<i2").tobytes()
    clips = {
        f"wav {subtype}": (wav(tone(), subtype=subtype), RATE)
        for subtype in ("PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW")
    }
    return clips | {
        "wavex": (clip(tone(), RATE, "WAVEX", "PCM_16"), RATE),
        "rf64": (clip(tone(), RATE, "RF64", "PCM_16"), RATE),
        "flac": (clip(tone(), RATE, "FLAC", "PCM_16"), RATE),
        "vorbis": (clip(tone(), RATE, "OGG", "VORBIS"), RATE),
        "opus": (clip(tone(48_000, 48_000), 48_000, "OGG", "OPUS"), RATE),
        "stereo": (wav(stereo), RATE),
        "8 kHz mu-law": (wav(tone(8_000, 8_000), 8_000, "ULAW"), RATE),
        "44.1 kHz": (wav(tone(44_100, 44_100), 44_100), RATE),
        "data size of a pipe": (raw_wav(odd_data, data_size=0xFFFFFFFF, riff_size=0xFFFFFFFF), RATE),
        "riff size 0": (raw_wav(odd_data, riff_size=0), RATE),
        "data shorter than said": (raw_wav(odd_data, data_size=2 * len(odd_data)), RATE),
        "half a sample at the end": (raw_wav(odd_data + b"\x7f"), RATE),
        "one sample": (wav(tone(1)), 1),
        "10 ms": (wav(tone(160)), 160),
        "silence": (wav(np.zeros(RATE)), RATE),
        "peaks of 50": (wav_of_floats([50.0, -50.0] * 800), 1_600),
    }
