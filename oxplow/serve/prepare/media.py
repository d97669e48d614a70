"""Pictures and clips of a request: fetched, decoded, cut into patches, placed in the prompt.

Owns data URLs, the list of allowed hosts and the content names of patches. Knows no message form.
Invariant: nothing is read from the network unless its host was allowed by the person who started
the server; every fault is a RequestError that names the part.
"""

from __future__ import annotations

import base64
import binascii
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from hashlib import blake2b
from http.client import HTTPException, HTTPMessage
from typing import IO
from urllib.parse import unquote_to_bytes, urlsplit

import numpy as np
from numpy.typing import NDArray

from oxplow.errors import RequestError
from oxplow.serve.engine_port import WirePicture
from oxplow.serve.formats.history import MediaSource
from oxplow.serve.images import PreparedImage, decode_image, prepare_image
from oxplow.serve.model_files import ModelFiles
from oxplow.serve.placeholders import MediaSpan, expand_placeholders
from oxplow.serve.video import PreparedVideo, prepare_video

__all__ = ["place_media"]

_DATA_URL = re.compile(r"data:([^,;]*)((?:;[^,;]*)*),", re.IGNORECASE)
_MOST_BYTES = 64 << 20
_TIMEOUT_S = 10.0


def place_media(
    token_ids: list[int],
    sources: Sequence[MediaSource],
    files: ModelFiles,
    domains: Sequence[str],
    encode: Callable[[str], Sequence[int]],
) -> tuple[list[int], tuple[WirePicture, ...]]:
    """Return the prompt with its places expanded, and the pictures in their order."""
    if not sources:
        return token_ids, ()
    if files.media is None:
        raise RequestError(
            "this model does not see pictures",
            wanted="text only",
            param=sources[0].param,
            code="unsupported",
        )
    images: list[PreparedImage] = []
    videos: list[PreparedVideo] = []
    for source in sources:
        data = _read(source, domains)
        if source.kind == "image":
            picture = decode_image(data, where=source.param)
            images.append(prepare_image(picture, files.image))
        else:
            videos.append(prepare_video(data, files.video))
    prompt = expand_placeholders(token_ids, images, videos, files.media, encode)
    pictures = tuple(_picture(span, images, videos) for span in prompt.spans)
    return prompt.token_ids, pictures


def _picture(
    span: MediaSpan, images: Sequence[PreparedImage], videos: Sequence[PreparedVideo]
) -> WirePicture:
    """Cut out the rows of one place: a picture, or one temporal patch of a clip."""
    if span.kind == "image":
        grid, rows = images[span.item].grid_thw, images[span.item].pixel_values
    else:
        video = videos[span.item]
        _, height, width = video.grid_thw
        grid = (1, height, width)
        patches = height * width
        rows = video.pixel_values[span.step * patches : (span.step + 1) * patches]
    return WirePicture(
        start=span.start,
        num_tokens=span.num_tokens,
        content_hash=_content_name(rows, grid),
        pixels=np.ascontiguousarray(rows, dtype=np.float32).tobytes(),
        row_width=rows.shape[1],
        grid=grid,
    )


def _content_name(rows: NDArray[np.float32], grid: tuple[int, int, int]) -> str:
    """Name patches by their values, which covers the preprocessing too."""
    digest = blake2b(digest_size=16)
    digest.update(repr(grid).encode())
    digest.update(np.ascontiguousarray(rows, dtype=np.float32).data)
    return digest.hexdigest()


def _read(source: MediaSource, domains: Sequence[str]) -> bytes:
    if source.url[:5].lower() == "data:":
        return _from_data_url(source)
    return _from_address(source, domains)


def _from_data_url(source: MediaSource) -> bytes:
    head = _DATA_URL.match(source.url)
    if head is None:
        raise _refusal(source, "the data URL is not valid", source.url[:40], "data:TYPE;base64,...")
    payload = source.url[head.end() :]
    if ";base64" not in head.group(2).lower():
        return unquote_to_bytes(payload)
    try:
        return base64.b64decode(re.sub(r"\s+", "", payload), validate=True)
    except (binascii.Error, ValueError) as error:
        raise _refusal(source, "the data URL is not base64", str(error), "base64") from error


def _from_address(source: MediaSource, domains: Sequence[str]) -> bytes:
    parts = urlsplit(source.url)
    host = (parts.hostname or "").lower()
    if parts.scheme not in ("http", "https") or host not in domains:
        wanted = "a data URL"
        if domains:
            wanted += " or an http address on " + ", ".join(domains)
        raise _refusal(source, "this address is not read", source.url[:80], wanted)
    opener = urllib.request.build_opener(_NoRedirect)
    try:
        with opener.open(source.url, timeout=_TIMEOUT_S) as answer:
            data = answer.read(_MOST_BYTES + 1)
    except (urllib.error.URLError, OSError, HTTPException) as error:
        raise _refusal(source, "the address does not answer", str(error), "a file") from error
    if len(data) > _MOST_BYTES:
        raise _refusal(source, "the file is too large", "more", f"at most {_MOST_BYTES} bytes")
    return bytes(data)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: they could lead to a host that was not allowed."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: HTTPMessage,
        newurl: str,
    ) -> None:
        """Follow nothing; the caller sees the redirect as an HTTP error."""
        return


def _refusal(source: MediaSource, what: str, got: object, wanted: object) -> RequestError:
    return RequestError(
        what, got=got, wanted=wanted, where=source.param, param=source.param, code="invalid_media"
    )
