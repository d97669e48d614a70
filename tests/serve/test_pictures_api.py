"""Pictures in conversations: every kind of file is answered or refused, never more."""

import base64
import io
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from oxplow.serve.images import ImageSettings, num_image_tokens
from tests.serve.model_dir import ID
from tests.serve.running import Running, options, running
from tests.serve.test_agent_apis import prompt_of


def data_url(image: Image.Image, kind: str = "PNG", mime: str = "image/png", **how: Any) -> str:
    buffer = io.BytesIO()
    image.save(buffer, kind, **how)
    return f"data:{mime};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def ask(server: Running, *urls: str, text: str = "</think>ok") -> Any:
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": u}} for u in urls]
    body = {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]}
    return server.client.post("/v1/chat/completions", json=body)


@pytest.mark.parametrize(
    ("size", "mode", "kind"),
    [
        ((1, 1), "RGB", "PNG"),
        ((27, 257), "RGB", "PNG"),
        ((1, 2000), "RGB", "PNG"),
        ((2000, 1), "RGB", "PNG"),
        ((8, 8), "L", "PNG"),
        ((30, 30), "LA", "PNG"),
        ((30, 30), "P", "PNG"),
        ((30, 30), "RGBA", "PNG"),
        ((30, 30), "I;16", "PNG"),
        ((30, 30), "CMYK", "JPEG"),
        ((64, 48), "RGB", "WEBP"),
        ((64, 48), "P", "GIF"),
    ],
)
def test_every_kind_of_picture_takes_its_documented_tokens(
    server: Running, size: tuple[int, int], mode: str, kind: str
) -> None:
    answer = ask(server, data_url(Image.new(mode, size), kind, f"image/{kind}"))
    assert answer.status_code == 200, answer.text
    count = num_image_tokens(size[1], size[0], ImageSettings())
    assert prompt_of(server).count("<|image|>") == count
    plain = server.chat("</think>ok").json()["usage"]["prompt_tokens"]
    assert answer.json()["usage"]["prompt_tokens"] == plain + count + 2


def test_pictures_reach_the_engine_in_order_with_their_places(server: Running) -> None:
    red = data_url(Image.new("RGB", (56, 28), "red"))
    blue = data_url(Image.new("RGB", (28, 56), "blue"), mime="IMAGE/PNG")
    assert ask(server, red, blue, red).status_code == 200
    core = server.service.engine._transport._driver._core  # type: ignore[attr-defined]
    pictures = core.works[-1].pictures
    assert len(pictures) == 3
    assert pictures[0].content_hash == pictures[2].content_hash != pictures[1].content_hash
    ids = server.service.text.encode(prompt_of(server))
    for picture in pictures:
        place = ids[picture.start : picture.start + picture.num_tokens]
        assert set(place) == {ID["<|image|>"]}
        assert len(picture.pixels) == 4 * picture.row_width * picture.grid[1] * picture.grid[2]


def test_a_clip_becomes_one_picture_for_each_step(server: Running) -> None:
    frames = [Image.new("RGB", (32, 32), (40 * i, 0, 0)) for i in range(8)]
    buffer = io.BytesIO()
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:], duration=500)
    url = f"data:image/gif;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    parts = [{"type": "video_url", "video_url": {"url": url}}]
    body = {"messages": [{"role": "user", "content": [*parts, "</think>ok"]}]}
    answer = server.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert prompt_of(server).count(" seconds") >= 2


@pytest.mark.parametrize(
    "url",
    [
        "data:image/png;base64,AAAA",
        "data:image/png;base64,%%%",
        "data:image/png;base64,",
        "data:,",
        "data:nonsense",
        "http://127.0.0.1:9/x.png",
        "https://example.com/x.png",
        "file:///etc/passwd",
        "ftp://x/y",
        "x",
        data_url(Image.new("RGB", (40, 40)))[:-40],
    ],
)
def test_what_is_no_picture_is_refused(server: Running, url: str) -> None:
    answer = ask(server, url)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["code"] and error["message"]
    assert server.chat("</think>fine").status_code == 200


class _Shelf(BaseHTTPRequestHandler):
    """Serves one picture, and a redirect to it."""

    def do_GET(self) -> None:
        self.server.asked.append(self.path)  # type: ignore[attr-defined]
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("Location", "/red.png")
            self.end_headers()
            return
        buffer = io.BytesIO()
        Image.new("RGB", (40, 40), "red").save(buffer, "PNG")
        self.send_response(200)
        self.end_headers()
        self.wfile.write(buffer.getvalue())

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def test_addresses_are_read_from_allowed_hosts_only(server: Running, model_dir: Path) -> None:
    shelf = ThreadingHTTPServer(("127.0.0.1", 0), _Shelf)
    shelf.asked = []  # type: ignore[attr-defined]
    threading.Thread(target=shelf.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{shelf.server_address[1]}"
    try:
        assert ask(server, f"{url}/red.png").status_code == 400
        assert shelf.asked == []  # type: ignore[attr-defined]
        chosen = replace(options(model_dir), media_domains=("127.0.0.1",))
        with running(chosen) as open_server:
            assert ask(open_server, f"{url}/red.png").status_code == 200
            assert ask(open_server, f"{url}/moved").status_code == 400
            assert ask(open_server, "http://localhost/red.png").status_code == 400
        assert shelf.asked == ["/red.png", "/moved"]  # type: ignore[attr-defined]
    finally:
        shelf.shutdown()
        shelf.server_close()


def test_a_picture_that_lies_about_its_size_is_refused(server: Running) -> None:
    import struct
    import zlib

    def chunk(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    head = struct.pack(">IIBBBBB", 60000, 60000, 8, 2, 0, 0, 0)
    file = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", b"x") + chunk(b"IEND", b"")
    answer = ask(server, "data:image/png;base64," + base64.b64encode(file).decode())
    assert answer.status_code == 400
    assert "pixels" in answer.json()["error"]["message"]


def test_pictures_count_towards_the_context(server: Running) -> None:
    url = data_url(Image.new("RGB", (1500, 1500)))
    assert ask(server, url).status_code == 200
    answer = ask(server, url, url, url)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_alpha_that_is_opaque_changes_nothing(server: Running) -> None:
    image = Image.effect_noise((40, 40), 50).convert("RGB")
    core = server.service.engine._transport._driver._core  # type: ignore[attr-defined]
    seen = []
    for picture in (image, image.convert("RGBA")):
        assert ask(server, data_url(picture)).status_code == 200
        seen.append(core.works[-1].pictures[0].pixels)
    assert seen[0] == seen[1]


def test_pictures_come_through_every_api(server: Running) -> None:
    url = data_url(Image.new("RGB", (40, 40)))
    responses = [
        {"role": "user", "content": [{"type": "input_image", "image_url": url}, "</think>ok"]}
    ]
    assert server.client.post("/v1/responses", json={"input": responses}).status_code == 200
    assert "<|image|>" in prompt_of(server)
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    block = {"type": "image", "source": source}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [block]}
    for content in ([block, {"type": "text", "text": "</think>ok"}], [result]):
        body = {"max_tokens": 9, "messages": [{"role": "user", "content": content}]}
        assert server.client.post("/v1/messages", json=body).status_code == 200
        assert "<|image|>" in prompt_of(server)
