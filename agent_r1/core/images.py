"""Read and convert image files with pillow, which the extra ``images`` installs.

A file from a model, a client or a server is untrusted. So its size is checked before it is decoded.
"""

from __future__ import annotations

import base64
import binascii
import io
from typing import Any, NamedTuple

from agent_r1.core.errors import InvalidInput, import_extra

MAX_IMAGE_BYTES = 20 * 2**20

MAX_ASPECT_RATIO = 100
"""The maximum ratio of the longer side to the shorter side. Image processors refuse larger ratios."""

MAX_IMAGE_PIXELS = 2**25
"""The maximum number of pixels in an image: slightly more than 7680 x 4320 pixels, which take 100 MB when decoded."""

# MPO: a JPEG with a second picture after its end, as many phones write it
_MIME_TYPES = {"PNG": "image/png", "JPEG": "image/jpeg", "MPO": "image/jpeg", "GIF": "image/gif", "WEBP": "image/webp"}

_PNG_MODES = frozenset({"1", "L", "LA", "P", "RGB", "RGBA", "I;16", "I;16B"})
"""The modes of pillow that a PNG can store without conversion."""


class ImageHeader(NamedTuple):
    mime: str
    width: int
    height: int


def read_header(data: bytes, mime: str | None = None) -> ImageHeader:
    """Return the format and size of an image file. The pixels are not decoded."""
    picture = _open(data)
    found = _MIME_TYPES[picture.format]
    if mime is not None and mime.lower().replace("image/jpg", "image/jpeg") != found:
        raise InvalidInput("image", got=f"{found} declared as {mime}", do="declare its own type")
    return ImageHeader(found, picture.width, picture.height)


def _open(data: bytes) -> Any:
    if len(data) > MAX_IMAGE_BYTES:
        raise InvalidInput("image", got=f"{len(data)} bytes", do=f"give at most {MAX_IMAGE_BYTES}")
    pillow = import_extra("PIL.Image", "images")
    try:
        picture = pillow.open(io.BytesIO(data), formats=("PNG", "JPEG", "GIF", "WEBP"))  # reads the header only
    except pillow.UnidentifiedImageError as error:
        got = f"{len(data)} bytes that pillow cannot identify"
        raise InvalidInput("image", got=got, do="give a complete PNG, JPEG, GIF or WebP file") from error
    except Exception as error:  # pillow raises many types of errors
        raise _damaged(error) from error
    width, height = picture.size
    if not 0 < width * height <= MAX_IMAGE_PIXELS or max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        do = f"give 1 to {MAX_IMAGE_PIXELS} pixels, and sides with a ratio of at most {MAX_ASPECT_RATIO}"
        raise InvalidInput("image", got=f"{width} x {height} pixels", do=do)
    return picture


def _damaged(error: Exception) -> InvalidInput:
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    return InvalidInput("image", got=f"a file that cannot be decoded: {reason}", do="save it again")


def decode_data_url(url: str) -> tuple[bytes, str]:
    """Return (bytes, MIME type) of a data URL such as ``data:image/png;base64,iVBOR..``."""
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
    Raise InvalidInput in the cases of :func:`read_header`, and if the file is truncated or damaged.
    """
    picture = _open(data)
    pillow, operations = import_extra("PIL.Image", "images"), import_extra("PIL.ImageOps", "images")
    try:
        picture = operations.exif_transpose(picture)
        if picture.mode.startswith("I"):  # gray of 16 bits, which convert() would cut off at 255
            return picture.convert("I").point(lambda value: value * (255 / 65535)).convert("L").convert("RGB")
        if "A" in picture.getbands() or picture.info.get("transparency") is not None:
            white = pillow.new("RGBA", picture.size, "white")
            picture = pillow.alpha_composite(white, picture.convert("RGBA"))
        return picture.convert("RGB")
    except Exception as error:  # pillow raises many types of errors
        raise _damaged(error) from error


def encode_picture(picture: Any) -> bytes:
    """Return a ``PIL.Image.Image`` as the bytes of a PNG. Modes that PNG does not support become RGB or RGBA."""
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
