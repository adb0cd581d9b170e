"""The paths of a server and their answers."""

import asyncio
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from errors import printable
from inference.serve import page
from inference.serve.batching import Batcher, Full, Item, Lost
from inference.serve.bodies import Encoded, Refused, Upload, images_of
from inference.serve.gate import refusal
from inference.serve.metrics import Metrics
from inference.serve.settings import Settings
from inference.serve.workers import Pool

Top = Annotated[int | None, Query(ge=1, le=100_000, description="classes per image; default: 5, multi-label: all")]
Threshold = Annotated[float | None, Query(ge=0, le=1, description="multi-label: least probability; default: trained")]


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


_IMAGES = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "properties": {"image": {"type": "array", "items": {"type": "string", "format": "binary"}}},
                }
            },
            "application/json": {"schema": Encoded.model_json_schema()},
            "image/*": {"schema": {"type": "string", "format": "binary"}},
        },
    }
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
        503: "loading, ending, or the process that computed ended twice",
        504: "the answer took too long",
    }.items()
}


def create_app(
    settings: Settings, batcher: Batcher, pool: Pool, metrics: Metrics, draining: Callable[[], bool]
) -> FastAPI:
    """Returns the application; ``gate.Gate`` stands before it."""
    app = FastAPI(title="paddle-vit", description=page.ABOUT, docs_url=None, redoc_url=None, redirect_slashes=False)
    _problems(app)
    _answering(app, settings, batcher, pool, metrics)
    _telling(app, batcher, pool, metrics, draining)
    return app


def _answering(app: FastAPI, settings: Settings, batcher: Batcher, pool: Pool, metrics: Metrics) -> None:
    """What images are sent to (``gate.WORK``)."""

    async def asked(
        request: Request, kind: str, top: int | None, threshold: float | None
    ) -> list[tuple[Upload, dict, bytes]]:
        most = settings.max_images if kind == "predict" else 1
        uploads = await images_of(request.scope.pop("body"), request.headers.get("content-type", ""), most)
        request.scope["images"] = f"{len(uploads)} image{'s' * (len(uploads) > 1)}"
        loop, words = asyncio.get_running_loop(), {"kind": kind, "top": top, "threshold": threshold}
        client = (request.scope.get("client") or [""])[0]
        items = [Item(data, words, loop.create_future(), client, kind != "predict") for _, data in uploads]
        answers = await _answers(items, batcher, settings.timeout)
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
        # The page shows an image as the model sees it.
        return JSONResponse(content, status, {"x-exif-orientation": str(pool.oriented).lower()})

    @app.post("/attention", responses=_PROBLEMS | {200: {"content": {"image/png": {}}}}, openapi_extra=_IMAGES)
    async def attention(request: Request) -> Response:
        """Answers with a PNG of one image, coloured where the model looks."""
        [(upload, answer, picture)] = await asked(request, "attention", 1, 0.0)
        if "error" in answer:
            status, line = _unreadable([{"name": upload.name, **answer}])
            raise Refused(status, line)
        return Response(picture, media_type="image/png")


def _telling(app: FastAPI, batcher: Batcher, pool: Pool, metrics: Metrics, draining: Callable[[], bool]) -> None:
    """What tells of the server, and the pages."""

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Returns whether the server is alive."""
        return {"status": "alive"}

    @app.get("/ready", responses={503: {"description": "loading or ending"}})
    async def ready() -> Response:
        """Returns whether requests are taken."""
        status = "draining" if draining() else "ready" if pool.ready() else "loading"
        told = {"status": status, "workers": pool.ready(), "waiting": len(batcher)}
        return JSONResponse(told, 200 if status == "ready" else 503)

    @app.get("/metrics", response_class=Response)
    async def measured() -> Response:
        """Counts, as Prometheus reads them."""
        metrics.waiting.set(len(batcher))
        metrics.ready.set(pool.ready())
        return Response(metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/", include_in_schema=False)
    async def first() -> HTMLResponse:
        return HTMLResponse(page.HTML, headers=page.HEADERS)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(page.document(app.openapi()), headers=page.HEADERS)


async def _answers(items: list[Item], batcher: Batcher, timeout: float) -> list[tuple[dict[str, Any], bytes]]:
    together = asyncio.gather(*(item.answer for item in items))
    together.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # or asyncio says nobody asked
    try:
        batcher.put(items)
        return await asyncio.wait_for(together, timeout)
    except Full as full:
        raise Refused(429, str(full), full.seconds) from None
    except Lost as lost:
        raise Refused(503, str(lost), 1) from None
    except asyncio.TimeoutError:
        raise Refused(504, f"there was no answer within {timeout:g} s") from None
    finally:
        for item in items:
            item.answer.cancel()


def _unreadable(predictions: list[dict[str, Any]]) -> tuple[int, str]:
    """The status and the line where no image of a request can be read."""
    status = 413 if all("DATA.MAX_PIXELS" in found["error"] for found in predictions) else 422
    if len(predictions) > 1:
        return status, f"none of the {len(predictions)} images can be read"
    return status, f"{predictions[0]['name']}: {predictions[0]['error']}"


def _problems(app: FastAPI) -> None:
    """Gives every answer that isn't what was wished for the form of Problem."""

    @app.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> Response:
        return refusal(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return refusal(Refused(422, f"{printable(str(first['loc'][-1]), 60)}: {printable(first['msg'], 200)}"))

    @app.exception_handler(HTTPException)
    async def other(_: Request, error: HTTPException) -> Response:
        response = refusal(Refused(error.status_code, str(error.detail)))
        response.headers.update(error.headers or {})
        return response
