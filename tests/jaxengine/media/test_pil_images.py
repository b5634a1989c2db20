"""Pictures for programs: fetched by address or name, converted and encoded, without loss."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from jaxengine.media.base.errors import MediaError
from jaxengine.media.fetching.pil_images import convert_image_mode, encode_image_url, fetch_image

PIXELS = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)


def test_a_picture_survives_its_address_and_its_file(tmp_path):
    image = Image.fromarray(PIXELS)
    url = encode_image_url(image)
    assert url.startswith("data:image/png;base64,")
    image.save(tmp_path / "a.png")
    for address in (url, str(tmp_path / "a.png"), (tmp_path / "a.png").as_uri()):
        found = fetch_image(address)
        assert found.mode == "RGB" and np.array_equal(np.asarray(found), PIXELS), address


def test_transparency_gets_the_background():
    clear = Image.new("RGBA", (2, 2), (9, 9, 9, 0))
    assert convert_image_mode(clear, "RGB").getpixel((0, 0)) == (255, 255, 255)
    assert convert_image_mode(clear, "RGB", (1, 2, 3)).getpixel((0, 0)) == (1, 2, 3)
    assert convert_image_mode(clear, "L").mode == "L"
    url = encode_image_url(clear)
    assert fetch_image(url).getpixel((0, 0)) == (255, 255, 255)


def test_private_hosts_are_not_fetched():
    with pytest.raises(MediaError):
        fetch_image("http://127.0.0.1:1/a.png")
