"""What a browser sees: the page at / and the list of paths at /docs. Nothing is loaded from
elsewhere.
"""

import base64
import hashlib
import re
from html import escape
from pathlib import Path
from typing import Any

ABOUT = "A trained model answers: classes and probabilities of images, and where it looks."
HTML = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
_STYLE = re.search(r"<style>(.*?)</style>", HTML, re.S)[1]  # pyright: ignore[reportOptionalSubscript]
_SCRIPT = re.search(r"<script>(.*?)</script>", HTML, re.S)[1]  # pyright: ignore[reportOptionalSubscript]


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


# A browser runs this page's own script and no other, whatever a class or a file is called.
_POLICY = f"default-src 'none'; script-src {_hash(_SCRIPT)}; style-src {_hash(_STYLE)}; img-src blob: data:"
_POLICY += "; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


def document(described: dict[str, Any]) -> str:
    """Returns a page of an OpenAPI description: each path, what it takes and what it answers."""
    parts = [
        f"<h1>{escape(described['info']['title'])}</h1><p>{escape(described['info']['description'])} "
    ]
    parts.append('<a href="openapi.json">openapi.json</a> says the same to programs.</p>')
    for path, methods in described["paths"].items():
        for method, said in methods.items():
            parts.append(
                f"<h2>{method.upper()} {escape(path)}</h2><p>{escape(said.get('description', ''))}</p>"
            )
            parts.append(_rows(_parameters_of(said, described["components"]["schemas"]), "takes"))
            answers = [
                (status, answer.get("description", ""), "")
                for status, answer in said["responses"].items()
            ]
            parts.append(_rows(answers, "answers"))
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
    )
    head += f"<title>Paths for programs</title><style>{_STYLE}</style>"
    return f'<!doctype html><html lang="en"><head>{head}</head><body><main>{"".join(parts)}</main></body></html>'


def _parameters_of(said: dict[str, Any], schemas: dict[str, Any]) -> list[tuple[str, str, str]]:
    rows = [("Authorization", "Bearer TOKEN", "")] if "security" in said else []
    for one in said.get("parameters", ()):
        # The schema of a parameter that may be missing has a second type, null.
        kinds = one["schema"].get("anyOf", [one["schema"]])
        form = next(kind for kind in kinds if kind.get("type") != "null")
        bounds = (
            f"{form['minimum']} to {form['maximum']}" if "minimum" in form else form.get("type", "")
        )
        rows.append((f"?{one['name']}=", one.get("description", ""), bounds))
    for kind, content in said.get("requestBody", {}).get("content", {}).items():
        form = content["schema"]
        if "$ref" in form:
            form = schemas[form["$ref"].rpartition("/")[2]]
        fields = form.get("properties", ["the image itself; its own type (image/...) will do, too"])
        rows.append((kind, ", ".join(fields), ""))
    return rows


def _rows(rows: list[tuple[str, str, str]], head: str) -> str:
    if not rows:
        return ""
    cells = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    return f"<table><caption>{head}</caption>{cells}</table>"
