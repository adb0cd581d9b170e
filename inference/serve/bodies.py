"""Reads the images of a request: uploads of a form, base64 in JSON, or the body itself."""

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

# Bytes of a form that are parsed before other requests have their turn.
_CHUNK = 1 << 16
# Fields of a form that aren't files. They are ignored.
_FIELDS = 20
# The extended parameter of RFC 5987, which RFC 7578 forbids in forms.
_EXTENDED = re.compile(rb";\s*filename\*", re.I)


class Refused(Exception):
    """A request is answered by an error.

    Args:
        status: the status of the HTTP response.
        text: a line that says why.
        retry: seconds after which another attempt makes sense; None: it doesn't.
    """

    def __init__(self, status: int, text: str, retry: int | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.retry = retry


class Upload(NamedTuple):
    """An image's name and the content of its file."""

    name: str
    data: bytes


class Encoded(BaseModel):
    """Images in JSON."""

    model_config = ConfigDict(extra="forbid", strict=True)
    images: list[str] = Field(
        description="each an image file (JPEG, PNG, ...) in base64", min_length=1
    )


async def images_of(body: bytes | bytearray, content_type: str, most: int) -> list[Upload]:
    """Returns the images of a request.

    Args:
        body: the body of the request.
        content_type: its Content-Type.
        most: the largest number of images that is accepted.

    Raises:
        Refused: the body has another type, is malformed or empty, or has too many images.
    """
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type == "multipart/form-data":
        images = await _uploads(body, content_type, most)
    elif media_type == "application/json":
        images = _encoded_images(body, most)
    elif media_type.startswith("image/") or media_type == "application/octet-stream":
        images = [Upload("image 0", bytes(body))] if body else []
    else:
        raise Refused(
            415,
            f"the Content-Type is {printable(content_type, 60) or 'missing'}, expected"
            " multipart/form-data, application/json or an image's own type",
        )
    if not images:
        raise Refused(400, "the request has no image")
    if len(images) > most:
        raise Refused(413, f"the request has {len(images)} images, at most {most} are allowed")
    return images


class _Form(MultiPartParser):
    """Starlette's parser of forms, but strict.

    Starlette accepts a form that is cut off, and takes a file for text if its name is only in the
    extended parameter.

    Attributes:
        whole: whether the form has its last boundary.
    """

    whole = False

    def on_end(self) -> None:
        self.whole = True

    def on_headers_finished(self) -> None:
        super().on_headers_finished()
        part = self._current_part
        if part.file is None and _EXTENDED.search(part.content_disposition or b""):
            raise MultiPartException("a file has a filename* but no filename")


async def _uploads(body: bytes | bytearray, content_type: str, most: int) -> list[Upload]:
    """Returns the files of a form."""
    _, options = parse_options_header(content_type)
    charset = options.get(b"charset", b"utf-8").decode("latin-1")
    # Some of Python's codecs take minutes.
    if charset.lower() not in ("utf-8", "utf8"):
        raise Refused(400, f"the form's charset is {printable(charset, 60)}, expected utf-8")

    async def chunks() -> AsyncGenerator[bytes, None]:
        for start in range(0, len(body), _CHUNK):
            yield bytes(body[start : start + _CHUNK])
            await asyncio.sleep(0)

    try:
        headers = Headers({"content-type": content_type})
        parser = _Form(headers, chunks(), max_files=most + 1, max_fields=_FIELDS)
        # Files stay in memory, instead of on a disk.
        parser.spool_max_size = len(body) + 1
        form = await parser.parse()
    except MultiPartException as error:
        if "Too many files" in error.message:
            raise Refused(413, f"the request has more than {most} images") from None
        raise Refused(400, f"the form can't be read ({printable(error.message, 100)})") from None
    except (ValueError, KeyError, AssertionError):
        # The boundary or the head of a part is malformed.
        raise Refused(400, "the form can't be read") from None
    if not parser.whole:
        await form.close()
        raise Refused(400, "the form is truncated")
    files = [file for _, file in form.multi_items() if isinstance(file, UploadFile)]
    images = [
        Upload(printable(file.filename or f"image {index}"), await file.read())
        for index, file in enumerate(files)
    ]
    await form.close()
    return images


def _encoded_images(body: bytes | bytearray, most: int) -> list[Upload]:
    """Returns the images in a body of JSON."""
    # JSON of a million small values takes a hundred times its size in memory. Base64 lacks the
    # characters that are counted here.
    if sum(map(body.count, (b",", b"[", b"{", b":"))) > most + 100:
        raise Refused(413, f"the JSON has more than {most} images")
    try:
        texts = Encoded.model_validate_json(body).images
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        problem = first["msg"]
        if first["loc"]:
            place = ".".join(map(str, first["loc"]))
            problem = f"{printable(place, 60)}: {problem}"
        raise Refused(400, f"invalid JSON: {problem}") from None
    images = []
    for index, text in enumerate(texts):
        try:
            images.append(Upload(f"image {index}", base64.b64decode(text, validate=True)))
        except (binascii.Error, ValueError):
            raise Refused(400, f"image {index} isn't in base64") from None
    return images
