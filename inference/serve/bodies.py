"""The images of a request: uploads, base64 in JSON, or the body itself."""

import asyncio
import base64
import binascii
import re
from collections.abc import AsyncGenerator
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser, parse_options_header

from errors import printable

_CHUNK = 1 << 16  # bytes of a form that are parsed before others have their turn
_FIELDS = 20  # of a form that are no files; they are let be
_EXTENDED = re.compile(rb";\s*filename\*", re.I)  # RFC 5987's, which RFC 7578 forbids in forms


class Refused(Exception):
    """A request that isn't answered as it wishes, with the status that says so."""

    def __init__(self, status: int, text: str, retry: int | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.retry = retry


class Upload(NamedTuple):
    """An image: what to call it, and its file."""

    name: str
    data: bytes


class Encoded(BaseModel):
    """Images in JSON."""

    model_config = ConfigDict(extra="forbid", strict=True)
    images: list[str] = Field(
        description="each an image file (JPEG, PNG, ...) in base64", min_length=1
    )


async def images_of(body: bytes | bytearray, kind: str, most: int) -> list[Upload]:
    """Returns a request's images.

    Args:
        kind: its Content-Type.
        most: images that it may have.

    Raises:
        Refused: it is of another kind, malformed, empty, or has too many.
    """
    plain = kind.partition(";")[0].strip().lower()
    if plain == "multipart/form-data":
        found = await _uploads(body, kind, most)
    elif plain == "application/json":
        found = _encoded_images(body, most)
    elif plain.startswith("image/") or plain == "application/octet-stream":
        found = [Upload("image 0", bytes(body))] if body else []
    else:
        known = "multipart/form-data, application/json or an image's own type"
        raise Refused(
            415, f"the Content-Type is {printable(kind, 60) or 'missing'}, expected {known}"
        )
    if not found:
        raise Refused(400, "the request holds no image")
    if len(found) > most:
        raise Refused(413, f"the request holds {len(found)} images, at most {most} are taken")
    return found


class _Form(MultiPartParser):
    """starlette's, which takes a form that was cut off for a whole one, and a file without a plain
    name for text.
    """

    whole = False

    def on_end(self) -> None:
        self.whole = True

    def on_headers_finished(self) -> None:
        super().on_headers_finished()
        part = self._current_part
        if part.file is None and _EXTENDED.search(part.content_disposition or b""):
            raise MultiPartException("a file is named by filename* alone, expected filename")


async def _uploads(body: bytes | bytearray, kind: str, most: int) -> list[Upload]:
    charset = parse_options_header(kind)[1].get(b"charset", b"utf-8").decode("latin-1")
    if charset.lower() not in ("utf-8", "utf8"):  # Python knows some that take minutes
        raise Refused(400, f"the form's charset is {printable(charset, 60)}, expected utf-8")

    async def chunks() -> AsyncGenerator[bytes, None]:
        for start in range(0, len(body), _CHUNK):
            yield bytes(body[start : start + _CHUNK])
            await asyncio.sleep(0)

    try:
        parser = _Form(
            Headers({"content-type": kind}), chunks(), max_files=most + 1, max_fields=_FIELDS
        )
        parser.spool_max_size = len(body) + 1  # nothing is written to a disk
        form = await parser.parse()
    except MultiPartException as error:
        if "Too many files" in error.message:
            raise Refused(
                413, f"the request holds more images than the {most} that are taken"
            ) from None
        raise Refused(400, f"the form can't be read ({printable(error.message, 100)})") from None
    except (ValueError, KeyError, AssertionError):
        # a boundary, or a head of a part, that isn't one
        raise Refused(400, "the form can't be read") from None
    if not parser.whole:
        await form.close()
        raise Refused(400, "the form ends before its last boundary")
    files = [file for _, file in form.multi_items() if isinstance(file, UploadFile)]
    found = [
        Upload(printable(file.filename or f"image {place}"), await file.read())
        for place, file in enumerate(files)
    ]
    await form.close()
    return found


def _encoded_images(body: bytes | bytearray, most: int) -> list[Upload]:
    # A text of a million small values takes a hundred times its size in memory. Base64 has none of
    # these characters.
    if sum(map(body.count, (b",", b"[", b"{", b":"))) > most + 100:
        raise Refused(413, f"the JSON holds more than the {most} images that are taken")
    try:
        texts = Encoded.model_validate_json(body).images
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise Refused(
            400, f"the JSON can't be taken: {place and f'{printable(place, 60)}: '}{first['msg']}"
        ) from None
    found = []
    for place, text in enumerate(texts):
        try:
            found.append(Upload(f"image {place}", base64.b64decode(text, validate=True)))
        except (binascii.Error, ValueError):
            raise Refused(400, f"image {place} isn't in base64") from None
    return found
