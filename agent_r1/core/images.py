"""Check, read and convert image files.

A file is checked before it is decoded: it must be complete, and declare a limited number of pixels. So decoding never
needs much memory.
"""

from __future__ import annotations

import base64
import binascii
import io
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from agent_r1.core.errors import InvalidInput, import_extra

MAX_IMAGE_BYTES = 20 * 2**20

MAX_ASPECT_RATIO = 100
"""The maximum ratio of the longer side to the shorter side. Image processors refuse larger ratios."""

MAX_IMAGE_PIXELS = 2**25
"""The maximum number of pixels in an image: slightly more than 7680 x 4320 pixels, which take 100 MB when decoded."""

FORMATS = "PNG, JPEG, GIF or WebP"

_PNG_MODES = frozenset({"1", "L", "LA", "P", "RGB", "RGBA", "I;16", "I;16B"})
"""The modes of pillow that a PNG can store without conversion."""


class ImageHeader(NamedTuple):
    mime: str
    width: int
    height: int


class _Damaged(Exception):
    """Raised if a file is not a complete image."""


def without_trailing_bytes(data: bytes) -> bytes:
    """Return an image file without the bytes after its end, such as the second picture that many phones append.

    A file that is not a complete image is returned unchanged.
    """
    try:
        return data[: _PARSERS[_format_of(data)](data)[2]]
    except (_Damaged, IndexError, KeyError):
        return data


def read_header(data: bytes, mime: str | None = None) -> ImageHeader:
    """Check an image file, and return its format and size.

    Raise InvalidInput if the file is too large, truncated or damaged, has bytes after its end, has too many pixels, has
    a too large aspect ratio, or is not of the declared type ``mime``.

    Example:
        read_header(png) == ImageHeader("image/png", 64, 48)
    """
    if len(data) > MAX_IMAGE_BYTES:
        raise InvalidInput("image", got=f"{len(data)} bytes", do=f"give at most {MAX_IMAGE_BYTES}")
    found = _format_of(data)
    if not found:
        kind = "SVG or another text" if data.lstrip()[:1] == b"<" else f"{len(data)} bytes of another format"
        raise InvalidInput("image", got=kind, do=f"give an image of the format {FORMATS}")
    if mime is not None and mime.lower().replace("image/jpg", "image/jpeg") != found:
        raise InvalidInput("image", got=f"{found} declared as {mime}", do="declare its own type")
    try:
        width, height, end = _PARSERS[found](data)
    except (_Damaged, IndexError) as error:
        reason = str(error) if isinstance(error, _Damaged) else "it ends too early"
        raise InvalidInput("image", got=f"a damaged {found}: {reason}", do="save it again as a whole file") from None
    if end != len(data):
        got = f"{found} with {len(data) - end} bytes after its end"
        raise InvalidInput("image", got=got, do="save it again without them")
    if not width or not height or width * height > MAX_IMAGE_PIXELS:
        do = f"give a smaller image, of 1 to {MAX_IMAGE_PIXELS} pixels"
        raise InvalidInput("image", got=f"{found} of {width} x {height} pixels", do=do)
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        do = f"give an image whose sides have a ratio of at most {MAX_ASPECT_RATIO}"
        raise InvalidInput("image", got=f"{found} of {width} x {height} pixels", do=do)
    return ImageHeader(found, width, height)


def _format_of(data: bytes) -> str:
    return next((kind for magic, kind in _MAGIC.items() if data.startswith(magic)), "")


def decode_data_url(url: str) -> tuple[bytes, str]:
    """Return (bytes, MIME type) of a data URL such as ``data:image/png;base64,iVBOR..``.

    Raise InvalidInput if the URL is not a data URL in base64, or is too long. No URL is fetched.
    """
    if not url.startswith("data:"):
        do = "send the image itself as data:image/png;base64,.. (addresses are not fetched)"
        raise InvalidInput("image_url", got=url[:80], do=do)
    head, comma, encoded = url.partition(",")
    if len(encoded) > 4 * MAX_IMAGE_BYTES // 3 + 4:
        raise InvalidInput("image_url", got=f"{len(url)} characters", do=f"give at most {MAX_IMAGE_BYTES} bytes")
    mime, _, encoding = head.removeprefix("data:").partition(";")
    if not comma or encoding != "base64":
        raise InvalidInput("image_url", got=head[:80], do="write it as data:image/png;base64,..")
    return decode_base64(encoded), mime


def decode_base64(encoded: str) -> bytes:
    """Decode a base64 text. Raise InvalidInput if the text is not base64."""
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidInput("image", got=f"text that is not base64 ({error})", do="encode the file in base64") from None


def decode_image(data: bytes) -> Any:
    """Return the image in a file as a ``PIL.Image.Image`` in RGB, converted as transformers' image processors do.

    The image is rotated as its EXIF data say. A transparent image is put on white. 16-bit gray is scaled to 8 bits.

    Raise InvalidInput if pillow is not installed, or if the file cannot be decoded.
    """
    pillow, operations = import_extra("PIL.Image", "images"), import_extra("PIL.ImageOps", "images")
    try:
        picture = pillow.open(io.BytesIO(data), formats=("PNG", "JPEG", "GIF", "WEBP"))
        if picture.width * picture.height > MAX_IMAGE_PIXELS:  # read_header found another size
            raise ValueError(f"it has {picture.width} x {picture.height} pixels")
        picture = operations.exif_transpose(picture)
        if picture.mode.startswith("I"):  # gray of 16 bits, which convert() would cut off at 255
            return picture.convert("I").point(lambda value: value * (255 / 65535)).convert("L").convert("RGB")
        if "A" in picture.getbands() or picture.info.get("transparency") is not None:
            white = pillow.new("RGBA", picture.size, "white")
            picture = pillow.alpha_composite(white, picture.convert("RGBA"))
        return picture.convert("RGB")
    except Exception as error:  # pillow raises many types of errors
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise InvalidInput("image", got=f"a file that cannot be decoded: {reason}", do="save it again") from error


def encode_picture(picture: Any) -> bytes:
    """Return a ``PIL.Image.Image`` as the bytes of a PNG. Modes that PNG does not support, such as CMYK, become RGB or
    RGBA.

    Raise InvalidInput if the range of the pixel values is unknown (modes I and F), or if the conversion fails.
    """
    do = "convert it to the mode RGB, L or RGBA"
    if picture.mode in ("I", "F"):
        raise InvalidInput("image", got=f"a picture of the mode {picture.mode}", do=do)
    file = io.BytesIO()
    try:
        if picture.mode not in _PNG_MODES:
            picture = picture.convert("RGBA" if picture.mode in ("PA", "RGBa") else "RGB")
        picture.save(file, "PNG")
    except Exception as error:  # pillow raises many types of errors
        raise InvalidInput("image", got=f"a picture of the mode {picture.mode}: {error}", do=do) from error
    return file.getvalue()


def _take(data: bytes, start: int, count: int) -> bytes:
    part = data[start : start + count]
    if len(part) < count:
        raise _Damaged("it ends too early")
    return part


def _big(data: bytes, start: int, count: int) -> int:
    return int.from_bytes(_take(data, start, count), "big")


def _little(data: bytes, start: int, count: int) -> int:
    return int.from_bytes(_take(data, start, count), "little")


def _parse_png(data: bytes) -> tuple[int, int, int]:
    position = 8
    if _take(data, 12, 4) != b"IHDR":
        raise _Damaged("it does not begin with its size")
    width, height = _big(data, 16, 4), _big(data, 20, 4)
    while True:
        size, kind = _big(data, position, 4), _take(data, position + 4, 4)
        content = _take(data, position + 8, size)
        if zlib.crc32(kind + content) != _big(data, position + 8 + size, 4):
            raise _Damaged("the checksum of a part is wrong")
        position += 12 + size
        if kind == b"IEND":
            return width, height, position


_JPEG_SIZES = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})
_JPEG_ALONE = frozenset({0x01, *range(0xD0, 0xD9)})


def _parse_jpeg(data: bytes) -> tuple[int, int, int]:
    position, width, height = 2, 0, 0
    while True:
        if data[position] != 0xFF:
            raise _Damaged("a part does not begin with a marker")
        marker = data[position + 1]
        if marker == 0xFF:
            position += 1
        elif marker == 0xD9:
            return width, height, position + 2
        elif marker in _JPEG_ALONE:
            position += 2
        else:
            size = _big(data, position + 2, 2)
            if marker in _JPEG_SIZES:
                height, width = _big(data, position + 5, 2), _big(data, position + 7, 2)
            position += 2 + size
            if marker == 0xDA:  # compressed data, in which FF is followed by 00 or by a restart marker
                position = data.find(b"\xff", position)
                while position >= 0 and data[position + 1] in (0x00, 0xFF, *range(0xD0, 0xD8)):
                    position = data.find(b"\xff", position + (1 if data[position + 1] == 0xFF else 2))
                if position < 0:
                    raise _Damaged("it ends too early")


def _parse_gif(data: bytes) -> tuple[int, int, int]:
    width, height, flags = _little(data, 6, 2), _little(data, 8, 2), data[10]
    position = 13 + (3 * 2 ** ((flags & 7) + 1) if flags & 0x80 else 0)
    while (block := data[position]) != 0x3B:
        if block == 0x2C:
            left, top = _little(data, position + 1, 2), _little(data, position + 3, 2)
            right, bottom = left + _little(data, position + 5, 2), top + _little(data, position + 7, 2)
            if right > width or bottom > height:
                raise _Damaged("a frame is larger than the picture")
            local = data[position + 9]
            position += 11 + (3 * 2 ** ((local & 7) + 1) if local & 0x80 else 0)
        elif block == 0x21:
            position += 2
        else:
            raise _Damaged("a part is of no known kind")
        while size := data[position]:
            position += 1 + size
        position += 1
    return width, height, position + 1


def _parse_webp(data: bytes) -> tuple[int, int, int]:
    end, kind = 8 + _little(data, 4, 4), _take(data, 12, 4)
    if _take(data, 8, 4) != b"WEBP":
        raise _Damaged("it is a RIFF file of another kind")
    if end > len(data):
        raise _Damaged("it ends too early")
    if kind == b"VP8X":
        return 1 + _little(data, 24, 3), 1 + _little(data, 27, 3), end
    if kind == b"VP8L":
        bits = _little(data, 21, 4)
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF), end
    if kind == b"VP8 ":
        return _little(data, 26, 2) & 0x3FFF, _little(data, 28, 2) & 0x3FFF, end
    raise _Damaged("its first part is of no known kind")


_MAGIC: Mapping[bytes, str] = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF87a": "image/gif",
    b"GIF89a": "image/gif",
    b"RIFF": "image/webp",
}

_PARSERS: Mapping[str, Callable[[bytes], tuple[int, int, int]]] = {
    "image/png": _parse_png,
    "image/jpeg": _parse_jpeg,
    "image/gif": _parse_gif,
    "image/webp": _parse_webp,
}
"""Functions that return (width, height, offset of the file's end), by format."""
