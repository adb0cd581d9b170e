"""The paths of a server and their answers."""

import asyncio
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from errors import InputError, counted, printable
from inference.serve import image_formats, page
from inference.serve.batching import CHOICES, Answer, Batcher, Full, Item, Lost
from inference.serve.bodies import Encoded, Refused, Upload, images_of
from inference.serve.gate import FAILED, GUARDED, refusal
from inference.serve.metrics import Metrics
from inference.serve.settings import Settings
from inference.serve.workers import Pool
from inference.text.names import check_classes

Top = Annotated[
    int | None,
    Query(
        ge=1, le=100_000, description="number of classes per image; default: 5, multi-label: all"
    ),
]
Threshold = Annotated[
    float | None,
    Query(
        ge=0, le=1, description="multi-label: lowest probability; default: the trained threshold"
    ),
]
Coverage = Annotated[
    float | None,
    Query(
        gt=0,
        lt=1,
        description="calibrated weights: return a set that contains the right class with this probability",
    ),
]
Reject = Annotated[
    float | None,
    Query(
        gt=0,
        lt=1,
        description="calibrated weights: detect unknown images, with this rate of false alarms",
    ),
]
Score = Annotated[
    Literal["energy", "max_logit", "knn"] | None,
    Query(description="the score that reject uses; default: energy"),
]

Classes = Annotated[
    str | None,
    Query(
        max_length=8000,
        description="models of images and texts: the classes to choose from, separated by commas",
    ),
]


class Predicted(BaseModel):
    """The prediction for an image, or the reason why the image can't be read."""

    name: str
    width: int | None = None
    height: int | None = None
    outputs: list[int] | None = None
    classes: list[str] | None = None
    probabilities: list[float] | None = None
    unknown: bool | None = None
    score: float | None = None
    percents: list[float] | None = None
    error: str | None = None


class Predictions(BaseModel):
    """The predictions for a request's images, in their order."""

    model: str
    task: str
    predictions: list[Predicted]
    error: str | None = None


class Problem(BaseModel):
    """The reason why a request isn't answered, in one line."""

    error: str


class Ready(BaseModel):
    """Whether requests are accepted, and by how many processes."""

    status: Literal["loading", "ready", "draining"]
    workers: int
    waiting: int


# What errors of images say that have more pixels than are read, or than there is memory for.
_TOO_LARGE = re.compile("DATA.MAX_PIXELS|out of memory")
# Parts of the OpenAPI description
_BYTES = "application/octet-stream"
_BINARY = {"type": "string", "format": "binary"}
_UPLOADS = {
    "title": "Uploads",
    "description": "Images as files; fields can have any name.",
    "type": "object",
    "properties": {"image": {"type": "array", "items": _BINARY, "minItems": 1}},
    "required": ["image"],
}
# A body of an image's own type is accepted, too. It isn't listed: generators of clients don't know
# ranges such as image/*.
_RAW = {_BYTES: {"schema": _BINARY}}
_FORMS = {
    "multipart/form-data": {"schema": {"$ref": "#/components/schemas/Uploads"}},
    "application/json": {"schema": {"$ref": "#/components/schemas/Encoded"}},
}
_IMAGES = {"requestBody": {"required": True, "content": _FORMS | _RAW}}
# Forms are accepted, too. They aren't listed: openapi-python-client 0.29 writes a client that can't
# be imported if a path has several kinds of bodies and no other parameter.
_IMAGE = {"requestBody": {"required": True, "content": _RAW}}
_PICTURE: Any = {200: {"content": {"image/png": {"schema": _BINARY}} | _RAW}}
# What only models with classes of whole images have in the description, and what only those with a
# class for each pixel have: paths, parameters of /predict, and properties of ``Predicted``.
_OF_IMAGES = (
    "/attention", "threshold", "coverage", "reject", "score", "probabilities", "unknown",
)  # fmt: skip
_OF_PIXELS = ("/mask", "width", "height", "percents")
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
        403: "an unexpected Host, or a page of another site",
        404: "the model doesn't support this endpoint",
        408: "the body arrived too slowly",
        413: "too many bytes, images or pixels",
        415: "an unsupported content type or encoding",
        422: "no image can be read, or a parameter is out of range",
        429: "too many images are waiting: try again after Retry-After seconds",
        500: "the server failed, and its log says why; or the process that worked on an image ended",
        503: "the server is starting or shutting down",
        504: "the answer, or reading an image, took too long",
    }.items()
}


def create_app(
    settings: Settings, batcher: Batcher, pool: Pool, metrics: Metrics, draining: Callable[[], bool]
) -> FastAPI:
    """Returns the application. Requests reach it through ``gate.Gate``.

    Args:
        draining: returns whether the server is ending.
    """
    app = FastAPI(
        title="paddle-vit",
        description=page.ABOUT,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        # Generated clients name their functions by the id.
        generate_unique_id_function=lambda route: route.name,
    )
    app.openapi = lambda: _description(app, bool(settings.token), pool)
    _add_error_handlers(app)
    _add_image_paths(app, _Images(settings, batcher, pool, metrics))
    _add_status_paths(app, batcher, pool, metrics, draining)
    _add_pages(app, settings, pool)
    return app


def _description(app: FastAPI, token: bool, pool: Pool) -> dict[str, Any]:
    """Returns the OpenAPI description. FastAPI's own lacks the bodies with images, and the token.

    What only other models answer or take is left out, once the model is loaded.
    """
    description = FastAPI.openapi(app)
    if pool.gives_maps is not None:
        _leave_out(description, _OF_IMAGES if pool.gives_maps else _OF_PIXELS)
        if not pool.takes_classes:
            predict = description["paths"]["/predict"]["post"]
            predict["parameters"] = [
                parameter for parameter in predict["parameters"] if parameter["name"] != "classes"
            ]
    if pool.gives_maps:
        description["info"]["description"] = page.ABOUT_MAPS
    description["components"]["schemas"] |= {
        "Encoded": Encoded.model_json_schema(),
        "Uploads": _UPLOADS,
    }
    description["components"]["securitySchemes"] = {"token": _TOKEN}
    if token:
        for path in GUARDED:
            for operation in description["paths"].get(path, {}).values():
                operation["security"] = [{"token": []}]
    return description


def _leave_out(description: dict[str, Any], names: Sequence[str]) -> None:
    """Removes paths, parameters of /predict and properties of predictions from a description."""
    predict = description["paths"]["/predict"]["post"]
    predict["parameters"] = [one for one in predict["parameters"] if one["name"] not in names]
    for name in names:
        description["paths"].pop(name, None)
        description["components"]["schemas"]["Predicted"]["properties"].pop(name, None)


class _Images:
    """Answers the images of requests."""

    def __init__(self, settings: Settings, batcher: Batcher, pool: Pool, metrics: Metrics) -> None:
        self.settings = settings
        self.batcher = batcher
        self.pool = pool
        self.metrics = metrics

    async def answers(
        self, request: Request, kind: str, **choices: Any
    ) -> list[tuple[Upload, Answer]]:
        """Returns the images of a request with their answers, in their order.

        Args:
            kind: "predict", "attention" or "mask".
            choices: which classes are given (``batching.CHOICES``); those left out are None.

        Raises:
            Refused: the model doesn't support this endpoints, the images can't be taken, or a worker has no
                answer for one of them.
        """
        most = self.settings.max_images if kind == "predict" else 1
        uploads = await images_of(
            request.scope.pop("body"), request.headers.get("content-type", ""), most
        )
        if problem := _lacking(kind, self.pool):
            raise Refused(404, problem)
        # The gate logs it.
        request.scope["images"] = counted(len(uploads), "image")
        if choices.get("classes") and self.pool.gives_maps:
            raise Refused(422, "classes is for models of images and texts; leave it out")
        client = request.scope["client"][0]
        parameters = {"kind": kind, **dict.fromkeys(CHOICES), **choices}
        loop = asyncio.get_running_loop()

        is_alone = kind != "predict" or self.pool.keeps_sizes
        # Only images of accepted formats go to a worker.
        problems = [image_formats.problem(upload.data, self.settings.formats) for upload in uploads]
        items = [
            Item(upload.data, parameters, loop.create_future(), client, is_alone)
            for upload, problem in zip(uploads, problems, strict=True)
            if problem is None
        ]
        answered = iter(await _answers(items, self.batcher, self.settings.timeout))
        answers = []
        for problem in problems:
            if problem is None:
                answers.append(next(answered))
            else:
                answers.append(Answer({"error": problem}))

        for answer in answers:
            if "refused" in answer.content:
                raise Refused(422, answer.content["refused"])
            if "failed" in answer.content:
                raise Refused(500, answer.content["failed"])
            outcome = "unreadable" if "error" in answer.content else "answered"
            self.metrics.images.labels(outcome).inc()
        return list(zip(uploads, answers, strict=True))

    async def picture(self, request: Request, kind: str) -> Response:
        """Returns the PNG that a worker makes of an image."""
        [(upload, answer)] = await self.answers(request, kind, top=1, threshold=0.0)
        if "error" in answer.content:
            status, line = _unreadable([{"name": upload.name, **answer.content}])
            raise Refused(status, line)
        media_type = "image/png"
        if request.headers.get("accept") == _BYTES:
            media_type = _BYTES
        return Response(answer.picture, media_type=media_type)


def _add_image_paths(app: FastAPI, images: _Images) -> None:
    """Adds the paths to which images are sent (``gate.WORK``)."""

    @app.post("/predict", response_model=Predictions, responses=_PROBLEMS, openapi_extra=_IMAGES)
    async def predict(
        request: Request,
        top: Top = None,
        threshold: Threshold = None,
        coverage: Coverage = None,
        reject: Reject = None,
        score: Score = None,
        classes: Classes = None,
    ) -> Response:
        """Returns the classes of one image or several: their probabilities, or of a model that gives
        a class for each pixel, their percentages of the pixels.
        """
        answers = await images.answers(
            request,
            "predict",
            top=top,
            threshold=threshold,
            coverage=coverage,
            reject=reject,
            score=score,
            classes=_named(classes),
        )
        predictions = [{"name": upload.name, **answer.content} for upload, answer in answers]
        content = {**images.pool.about, "predictions": predictions}
        status = 200
        if all("error" in prediction for prediction in predictions):
            status, content["error"] = _unreadable(predictions)
        # The page needs it to show an image as the model sees it.
        headers = {"x-exif-orientation": str(images.pool.oriented).lower()}
        return JSONResponse(content, status, headers)

    @app.post(
        "/attention", response_class=Response, responses=_PROBLEMS | _PICTURE, openapi_extra=_IMAGE
    )
    async def attention(request: Request) -> Response:
        """Returns a PNG of one image, coloured where the model looks. The image is sent as to
        /predict.
        """
        return await images.picture(request, "attention")

    @app.post(
        "/mask", response_class=Response, responses=_PROBLEMS | _PICTURE, openapi_extra=_IMAGE
    )
    async def mask(request: Request) -> Response:
        """Returns a PNG of the size of one image, whose pixels are the numbers of their classes: with
        a palette, or of more than 256 classes 16-bit grey. The image is sent as to /predict.
        """
        return await images.picture(request, "mask")


def _add_status_paths(
    app: FastAPI, batcher: Batcher, pool: Pool, measured: Metrics, draining: Callable[[], bool]
) -> None:
    """Adds the paths that report on the server."""

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
        """Returns whether requests are accepted."""
        workers = pool.ready()
        if draining():
            status = "draining"
        elif workers:
            status = "ready"
        else:
            status = "loading"
        content = {"status": status, "workers": workers, "waiting": len(batcher)}
        return JSONResponse(content, 200 if status == "ready" else 503)

    refused: Any = {status: _PROBLEMS[status] for status in (401, 403)}

    @app.get("/metrics", response_class=PlainTextResponse, responses=refused)
    async def metrics() -> Response:
        """Returns counts, in Prometheus' text format."""
        measured.waiting.set(len(batcher))
        measured.ready.set(pool.ready())
        return Response(measured.text(), media_type="text/plain; version=0.0.4")


def _add_pages(app: FastAPI, settings: Settings, pool: Pool) -> None:
    """Adds the pages for a browser."""

    @app.get("/", include_in_schema=False)
    async def start() -> HTMLResponse:
        html = page.HTML.replace("FORMATS", image_formats.listed(settings.formats))
        if pool.takes_classes:
            html = html.replace('id="names" hidden', 'id="names"')
        return HTMLResponse(html, headers=page.HEADERS)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(page.document(app.openapi()), headers=page.HEADERS)


async def _answers(items: list[Item], batcher: Batcher, timeout: float) -> list[Answer]:
    """Puts images into the queue, and waits for their answers.

    Raises:
        Refused: the queue is full, a worker ended because of an image, or the time is up.
    """
    if not items:
        return []
    answers = asyncio.gather(*(item.answer for item in items))
    # If the queue is full, nobody waits for the answers, and asyncio would log that their
    # exceptions were never retrieved.
    answers.add_done_callback(lambda future: future.cancelled() or future.exception())
    try:
        batcher.put(items)
        return await asyncio.wait_for(answers, timeout)
    except Full as full:
        raise Refused(429, str(full), full.seconds) from None
    except Lost as lost:
        raise Refused(lost.status, str(lost)) from None
    except asyncio.TimeoutError:
        raise Refused(504, f"there was no answer within {timeout:g} s") from None
    finally:
        for item in items:
            item.answer.cancel()


def _named(classes: str | None) -> list[str] | None:
    """Returns the names of classes in a request; None: it has none.

    Raises:
        Refused: as ``check_classes``.
    """
    if classes is None:
        return None
    names = [" ".join(name.split()) for name in classes.split(",")]
    try:
        check_classes(names)
    except InputError as error:
        raise Refused(422, f"classes: {error}") from None
    return names


def _lacking(kind: str, pool: Pool) -> str:
    """Returns a line if the model has no answers of a kind, and otherwise ""."""
    model = pool.about.get("model")
    if kind == "attention" and pool.gives_maps:
        return (
            f"{model} classifies pixels and can't explain its answer by a map; use /mask for"
            " the classes as a PNG"
        )
    if kind == "mask" and not pool.gives_maps:
        return f"{model} classifies whole images, not pixels; use /predict"
    return ""


def _unreadable(predictions: list[dict[str, Any]]) -> tuple[int, str]:
    """Returns the status and the error for a request of which no image can be read."""
    status = 422
    if all(_TOO_LARGE.search(prediction["error"]) for prediction in predictions):
        status = 413
    error = f"{predictions[0]['name']}: {predictions[0]['error']}"
    if len(predictions) > 1:
        error = f"none of the {len(predictions)} images can be read; {error}"
    return status, error


def _add_error_handlers(app: FastAPI) -> None:
    """Gives every error response the form of ``Problem``."""

    @app.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> Response:
        return refusal(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        parameter = printable(str(first["loc"][-1]), 60)
        return refusal(Refused(422, f"{parameter}: {printable(first['msg'], 200)}"))

    # Starlette's own answer is plain text. The gate logs the error.
    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> Response:
        return refusal(Refused(500, FAILED))

    @app.exception_handler(HTTPException)
    async def other(_: Request, error: HTTPException) -> Response:
        response = refusal(Refused(error.status_code, str(error.detail)))
        response.headers.update(error.headers or {})
        return response
