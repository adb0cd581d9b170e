"""The pages for a browser: "/" shows predictions, "/docs" lists the paths. They load nothing from
other sites.
"""

import base64
import hashlib
import re
from html import escape
from pathlib import Path
from typing import Any

ABOUT = "Classify images with a trained model, and see which regions it looks at."
ABOUT_MAPS = "Segment images with a trained model: a mask with the class of each pixel, and the area of each class."
HTML = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
_STYLE = re.search(r"<style>(.*?)</style>", HTML, re.S)[1]  # pyright: ignore[reportOptionalSubscript]
_SCRIPT = re.search(r"<script>(.*?)</script>", HTML, re.S)[1]  # pyright: ignore[reportOptionalSubscript]


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


# A browser runs this page's own script and no other, whatever the name of a class or a file is.
_POLICY = "; ".join(
    [
        "default-src 'none'",
        f"script-src {_hash(_SCRIPT)}",
        f"style-src {_hash(_STYLE)}",
        "img-src blob: data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
)
HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


def document(description: dict[str, Any]) -> str:
    """Returns a page of an OpenAPI description: each path, its parameters and its answers."""
    info = description["info"]
    schemas = description["components"]["schemas"]
    parts = [
        f"<h1>{escape(info['title'])}</h1><p>{escape(info['description'])} ",
        '<a href="openapi.json">openapi.json</a> describes them for programs.</p>',
    ]
    for path, operations in description["paths"].items():
        for method, operation in operations.items():
            parts.append(f"<h2>{method.upper()} {escape(path)}</h2>")
            parts.append(f"<p>{escape(operation.get('description', ''))}</p>")
            parts.append(_table("takes", _parameters(operation, schemas)))
            answers = [
                (status, answer.get("description", ""), "")
                for status, answer in operation["responses"].items()
            ]
            parts.append(_table("answers", answers))
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>Paths for programs</title><style>{_STYLE}</style>"
    )
    body = f"<main>{''.join(parts)}</main>"
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>'


def _parameters(operation: dict[str, Any], schemas: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Returns a row for each parameter and kind of body that an operation takes."""
    rows = []
    if "security" in operation:
        rows.append(("Authorization", "Bearer TOKEN", ""))
    for parameter in operation.get("parameters", ()):
        # The schema of an optional parameter has a second type, null.
        kinds = parameter["schema"].get("anyOf", [parameter["schema"]])
        form = next(kind for kind in kinds if kind.get("type") != "null")
        values = form.get("type", "")
        if "minimum" in form:
            values = f"{form['minimum']} to {form['maximum']}"
        rows.append((f"?{parameter['name']}=", parameter.get("description", ""), values))
    for media_type, content in operation.get("requestBody", {}).get("content", {}).items():
        schema = content["schema"]
        if "$ref" in schema:
            schema = schemas[schema["$ref"].rpartition("/")[2]]
        fields = schema.get(
            "properties", ["the image itself; its own type (image/...) works as well"]
        )
        rows.append((media_type, ", ".join(fields), ""))
    return rows


def _table(caption: str, rows: list[tuple[str, str, str]]) -> str:
    if not rows:
        return ""
    lines = []
    for row in rows:
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in row)
        lines.append(f"<tr>{cells}</tr>")
    return f"<table><caption>{caption}</caption>{''.join(lines)}</table>"
