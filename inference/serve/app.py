"""The paths of a server and their answers."""

import asyncio
from collections.abc import Callable
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from errors import printable
from inference.serve import image_formats, page
from inference.serve.batching import Batcher, Full, Item, Lost
from inference.serve.bodies import Encoded, Refused, Upload, images_of
from inference.serve.gate import FAILED, GUARDED, refusal
from inference.serve.metrics import Metrics
from inference.serve.settings import Settings
from inference.serve.workers import Pool

Top = Annotated[
    int | None,
    Query(ge=1, le=100_000, description="classes per image; default: 5, multi-label: all"),
]
Threshold = Annotated[
    float | None, Query(ge=0, le=1, description="multi-label: least probability; default: trained")
]


class Predicted(BaseModel):
    """What the model says of an image, or why it can't be read."""

    name: str
    outputs: list[int] | None = None
    classes: list[str] | None = None
    probabilities: list[float] | None = None
    error: str | None = None


class Predictions(BaseModel):
    """An answer: the images in the order of the request."""

    model: str
    task: str
    predictions: list[Predicted]
    error: str | None = None


class Problem(BaseModel):
    """Why a request isn't answered, in one line."""

    error: str


class Ready(BaseModel):
    """Whether requests are taken, and by how many processes."""

    status: Literal["loading", "ready", "draining"]
    workers: int
    waiting: int


_BINARY = {"type": "string", "format": "binary"}
_UPLOADS = {
    "title": "Uploads",
    "description": "Images as files; fields may be called anything.",
    "type": "object",
    "properties": {"image": {"type": "array", "items": _BINARY, "minItems": 1}},
    "required": ["image"],
}
# An image's own type is taken, too. It isn't listed: generators of clients don't know ranges such
# as image/*.
_RAW = {"application/octet-stream": {"schema": _BINARY}}
_FORMS = {
    "multipart/form-data": {"schema": {"$ref": "#/components/schemas/Uploads"}},
    "application/json": {"schema": {"$ref": "#/components/schemas/Encoded"}},
}
_IMAGES = {"requestBody": {"required": True, "content": _FORMS | _RAW}}
# Forms are taken, too. They aren't listed: a client of openapi-python-client 0.29 can't be imported
# if a path has several kinds of bodies and no other parameter.
_IMAGE = {"requestBody": {"required": True, "content": _RAW}}
_PICTURE: Any = {200: {"content": {"image/png": {"schema": _BINARY}} | _RAW}}
_TOKEN = {
    "type": "http",
    "scheme": "bearer",
    "description": "the token that the server was started with (-token_file)",
}
_PROBLEMS: Any = {
    status: {"model": Problem, "description": text}
    for status, text in {
        400: "malformed",
        401: "no token, or a wrong one",
        403: "a foreign Host, or a page of a foreign site",
        408: "the body came too slowly",
        413: "too many bytes, images or pixels",
        415: "a content type or encoding that isn't taken",
        422: "no image can be read, or a parameter is out of range",
        429: "too many images wait: try again after Retry-After seconds",
        500: "the server failed, and its log says why; or the process that worked on an image ended",
        503: "loading, or ending",
        504: "the answer took too long, or reading an image",
    }.items()
}


def create_app(
    settings: Settings, batcher: Batcher, pool: Pool, metrics: Metrics, draining: Callable[[], bool]
) -> FastAPI:
    """Returns the application; ``gate.Gate`` stands before it."""
    app = FastAPI(
        title="paddle-vit",
        description=page.ABOUT,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        # A generated client names its functions by it.
        generate_unique_id_function=lambda route: route.name,
    )
    app.openapi = lambda: _description(app, bool(settings.token))
    _problems(app)
    _answering(app, settings, batcher, pool, metrics)
    _telling(app, settings, batcher, pool, metrics, draining)
    return app


def _description(app: FastAPI, token: bool) -> dict[str, Any]:
    """Returns the OpenAPI description. FastAPI's own lacks the bodies with images, and the token."""
    described = FastAPI.openapi(app)
    described["components"]["schemas"] |= {
        "Encoded": Encoded.model_json_schema(),
        "Uploads": _UPLOADS,
    }
    described["components"]["securitySchemes"] = {"token": _TOKEN}
    for path in GUARDED if token else ():
        for said in described["paths"][path].values():
            said["security"] = [{"token": []}]
    return described


def _answering(
    app: FastAPI, settings: Settings, batcher: Batcher, pool: Pool, metrics: Metrics
) -> None:
    """Adds the paths that images are sent to (``gate.WORK``)."""

    async def asked(
        request: Request, kind: str, top: int | None, threshold: float | None
    ) -> list[tuple[Upload, dict, bytes]]:
        most = settings.max_images if kind == "predict" else 1
        uploads = await images_of(
            request.scope.pop("body"), request.headers.get("content-type", ""), most
        )
        request.scope["images"] = f"{len(uploads)} image{'s' * (len(uploads) > 1)}"
        loop = asyncio.get_running_loop()
        words = {"kind": kind, "top": top, "threshold": threshold}
        client = request.scope["client"][0]
        problems = [image_formats.problem(data, settings.formats) for _, data in uploads]
        taken = [
            data for (_, data), problem in zip(uploads, problems, strict=True) if problem is None
        ]
        items = [
            Item(data, words, loop.create_future(), client, kind != "predict") for data in taken
        ]
        found = iter(await _answers(items, batcher, settings.timeout))
        answers: list[tuple[dict[str, Any], bytes]] = []
        for problem in problems:
            answers.append(next(found) if problem is None else ({"error": problem}, b""))
        for answer, _ in answers:
            if "failed" in answer:
                raise Refused(500, answer["failed"])
            metrics.images.labels("unreadable" if "error" in answer else "answered").inc()
        return [(upload, *answer) for upload, answer in zip(uploads, answers, strict=True)]

    @app.post("/predict", response_model=Predictions, responses=_PROBLEMS, openapi_extra=_IMAGES)
    async def predict(request: Request, top: Top = None, threshold: Threshold = None) -> Response:
        """Classes and probabilities of one image or several."""
        found = await asked(request, "predict", top, threshold)
        predictions = [{"name": upload.name, **answer} for upload, answer, _ in found]
        content = {**pool.about, "predictions": predictions}
        status = 200
        if all("error" in answer for _, answer, _ in found):
            status, content["error"] = _unreadable(predictions)
        # The page reads it, to show an image as the model sees it.
        return JSONResponse(content, status, {"x-exif-orientation": str(pool.oriented).lower()})

    @app.post(
        "/attention", response_class=Response, responses=_PROBLEMS | _PICTURE, openapi_extra=_IMAGE
    )
    async def attention(request: Request) -> Response:
        """Answers with a PNG of one image, coloured where the model looks. Takes an image as
        /predict does.
        """
        [(upload, answer, picture)] = await asked(request, "attention", 1, 0.0)
        if "error" in answer:
            status, line = _unreadable([{"name": upload.name, **answer}])
            raise Refused(status, line)
        plain = request.headers.get("accept") in _RAW
        return Response(picture, media_type=next(iter(_RAW)) if plain else "image/png")


def _telling(
    app: FastAPI,
    settings: Settings,
    batcher: Batcher,
    pool: Pool,
    measured: Metrics,
    draining: Callable[[], bool],
) -> None:
    """Adds the paths that report on the server, and the pages."""

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Returns whether the server is alive."""
        return {"status": "alive"}

    @app.get(
        "/ready",
        response_model=Ready,
        responses={503: {"model": Ready, "description": "loading or ending"}},
    )
    async def ready() -> Response:
        """Returns whether requests are taken."""
        status = "draining" if draining() else "ready" if pool.ready() else "loading"
        told = {"status": status, "workers": pool.ready(), "waiting": len(batcher)}
        return JSONResponse(told, 200 if status == "ready" else 503)

    refused: Any = {status: _PROBLEMS[status] for status in (401, 403)}

    @app.get("/metrics", response_class=PlainTextResponse, responses=refused)
    async def metrics() -> Response:
        """Counts, as Prometheus reads them."""
        measured.waiting.set(len(batcher))
        measured.ready.set(pool.ready())
        return Response(measured.text(), media_type="text/plain; version=0.0.4")

    @app.get("/", include_in_schema=False)
    async def first() -> HTMLResponse:
        return HTMLResponse(
            page.HTML.replace("FORMATS", image_formats.listed(settings.formats)),
            headers=page.HEADERS,
        )

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(page.document(app.openapi()), headers=page.HEADERS)


async def _answers(
    items: list[Item], batcher: Batcher, timeout: float
) -> list[tuple[dict[str, Any], bytes]]:
    if not items:
        return []
    together = asyncio.gather(*(item.answer for item in items))
    # or asyncio says nobody asked
    together.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    try:
        batcher.put(items)
        return await asyncio.wait_for(together, timeout)
    except Full as full:
        raise Refused(429, str(full), full.seconds) from None
    except Lost as lost:
        raise Refused(lost.status, str(lost)) from None
    except asyncio.TimeoutError:
        raise Refused(504, f"there was no answer within {timeout:g} s") from None
    finally:
        for item in items:
            item.answer.cancel()


def _unreadable(predictions: list[dict[str, Any]]) -> tuple[int, str]:
    """The status and the line where no image of a request can be read."""
    status = 413 if all("DATA.MAX_PIXELS" in found["error"] for found in predictions) else 422
    if len(predictions) > 1:
        first = f"{predictions[0]['name']}: {predictions[0]['error']}"
        return status, f"none of the {len(predictions)} images can be read; {first}"
    return status, f"{predictions[0]['name']}: {predictions[0]['error']}"


def _problems(app: FastAPI) -> None:
    """Gives every error response the form of ``Problem``."""

    @app.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> Response:
        return refusal(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return refusal(
            Refused(422, f"{printable(str(first['loc'][-1]), 60)}: {printable(first['msg'], 200)}")
        )

    # starlette's own answer is plain text; the gate logs the error
    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> Response:
        return refusal(Refused(500, FAILED))

    @app.exception_handler(HTTPException)
    async def other(_: Request, error: HTTPException) -> Response:
        response = refusal(Refused(error.status_code, str(error.detail)))
        response.headers.update(error.headers or {})
        return response
