"""Images from files: what they are is read from the file, and hostile files are refused in one line."""

import base64
import io
import struct
import zlib

import pytest
from PIL import Image as Pillow
from transformers.image_transforms import convert_to_rgb

from agent_r1.core.errors import InvalidInput
from agent_r1.core.images import MAX_IMAGE_BYTES, decode_image
from agent_r1.core.messages import Image, Message, Text, from_openai, parts_text, to_openai
from agent_r1.core.task import Task


def file_of(format, width=12, height=8, **options):
    made = io.BytesIO()
    picture = Pillow.new("RGB", (width, height), "red")
    picture.putpixel((2, 3), (1, 2, 3))
    picture.save(made, format, **options)
    return made.getvalue()


def chunk(kind, content):
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(width, height, data=b""):
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", header), chunk(b"IDAT", data), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


FILES = {
    "png": file_of("PNG"),
    "jpeg": file_of("JPEG"),
    "progressive": file_of("JPEG", progressive=True),
    "gif": file_of("GIF"),
    "webp": file_of("WEBP"),
    "lossless": file_of("WEBP", lossless=True),
    "with profile": file_of("WEBP", icc_profile=b"profile"),
}


@pytest.mark.parametrize("name", FILES)
def test_type_and_size_are_read_from_the_file(name):
    image = Image.from_bytes(FILES[name])
    assert image.mime == f"image/{Pillow.open(io.BytesIO(FILES[name])).format.lower()}"
    assert (image.width, image.height) == (12, 8) == decode_image(FILES[name]).size
    assert str(image) == f"[{image.mime} 12x8 {image.sha256[:12]}]"


HOSTILE = {
    "an SVG": (b'<svg xmlns="http://www.w3.org/2000/svg"><script>1</script></svg>', "cannot identify"),
    "nothing": (b"", "cannot identify"),
    "a decompression bomb": (png(60_000, 60_000, zlib.compress(bytes(1000))), "decompression bomb"),
    "too many pixels": (png(8_000, 8_000), "8000 x 8000 pixels"),
    "no pixels": (png(0, 5), "cannot identify"),
    "a line": (png(1, 1000), "1 x 1000 pixels"),
    "a changed png": (FILES["png"].replace(b"IDAT", b"IDAU"), "cannot identify"),
    "half of a gif": (FILES["gif"][:30], "cannot identify"),
    "half of a webp": (FILES["webp"][:30], "cannot be decoded"),
    "a large file": (b"\x89PNG" + bytes(MAX_IMAGE_BYTES), "bytes"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_in_one_line(name):
    data, reason = HOSTILE[name]
    for read in (Image.from_bytes, decode_image):
        with pytest.raises(InvalidInput, match=reason) as caught:
            read(data)
        assert "\n" not in str(caught.value)


def transparent(mode):
    made = Pillow.new("RGBA", (4, 4), (200, 30, 40, 128))
    made.putpixel((0, 0), (0, 0, 0, 0))
    return made if mode == "RGBA" else made.convert(mode)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_pictures_are_on_white_as_in_the_processors_of_transformers(mode):
    data = Image.from_pil(transparent(mode)).data
    decoded, picture = decode_image(data), Pillow.open(io.BytesIO(data))
    assert decoded.getpixel((0, 0)) == (255, 255, 255)
    assert decoded.tobytes() == convert_to_rgb(picture, return_numpy=True).tobytes()


def test_gray_of_16_bits_is_scaled():
    picture = Pillow.new("I;16", (3, 1))
    for place, value in enumerate((0, 0x8080, 0xFFFF)):
        picture.putpixel((place, 0), value)
    file = io.BytesIO()
    picture.save(file, "PNG", transparency=0xFFFF)
    for data in (Image.from_pil(picture).data, file.getvalue()):
        assert [decode_image(data).getpixel((place, 0))[0] for place in range(3)] == [0, 128, 255]


def test_pictures_of_other_modes_are_converted_or_refused():
    for mode in ("CMYK", "YCbCr", "HSV", "LAB", "PA", "RGBX", "I;16L"):
        assert Image.from_pil(Pillow.new(mode, (4, 4))).mime == "image/png", mode
    assert decode_image(Image.from_pil(Pillow.new("CMYK", (4, 4), (0, 255, 255, 0))).data).getpixel((0, 0))[1] < 60
    for mode in ("F", "I", "La"):
        with pytest.raises(InvalidInput, match=f"a picture of the mode {mode}"):
            Image.from_pil(Pillow.new(mode, (4, 4)))


def data_url(data, mime="image/png"):
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


def test_a_message_with_an_image_is_converted_to_the_openai_format_and_back():
    message = Message("user", (Text("Look:"), Image.from_bytes(FILES["png"]), Text("Well?")))
    data = to_openai(message)
    assert data["content"][1] == {"type": "image_url", "image_url": {"url": data_url(FILES["png"])}}
    assert from_openai(data) == message
    assert from_openai(data).images[0].data == FILES["png"]
    assert parts_text(message.parts) == f"Look:\n{message.images[0]}\nWell?"


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("https://example.org/a.png", "addresses are not fetched"),
        ("file:///etc/passwd", "addresses are not fetched"),
        (data_url(FILES["png"], "image/jpeg"), "image/png declared as image/jpeg"),
        (data_url(FILES["png"], "text/html"), "declared as text/html"),
        ("data:image/png,raw", "base64"),
        ("data:image/png;base64,***", "not base64"),
        ("data:image/png;base64," + "A" * (2 * MAX_IMAGE_BYTES), "characters"),
    ],
)
def test_urls_that_are_no_data_are_refused(url, reason):
    with pytest.raises(InvalidInput, match=reason) as caught:
        Image.from_data_url(url)
    assert len(str(caught.value)) < 600 and "\n" not in str(caught.value)


def test_a_task_with_a_broken_image_is_refused_with_its_name():
    content = [{"type": "image_url", "image_url": {"url": data_url(FILES["png"][:20])}}]
    with pytest.raises(InvalidInput, match="messages of task t/1: image"):
        Task("t/1", [{"role": "user", "content": content}])
    with pytest.raises(InvalidInput, match="neither text nor image_url"):
        Task("t/1", [{"role": "user", "content": [{"type": "video", "video": "x"}]}])


def test_the_first_picture_of_a_phone_is_read(tmp_path):
    first, second = Pillow.new("RGB", (8, 6), "red"), Pillow.new("RGB", (4, 4), "blue")
    file = tmp_path / "phone.jpg"
    first.save(file, "MPO", save_all=True, append_images=[second])
    image = Image.from_file(file)
    assert (image.mime, image.width, image.height) == ("image/jpeg", 8, 6) and decode_image(image.data).size == (8, 6)
    with pytest.raises(InvalidInput, match="No such file"):
        Image.from_file(tmp_path / "missing.jpg")


def test_a_path_in_a_task_file_is_refused_with_the_parts_that_can_be_given():
    with pytest.raises(
        InvalidInput, match=r"task t: image: got 'a\.png' in a part.*; give a part of the type image_url"
    ):
        Task("t", [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}])
