"""What mkdocs.yml makes a site of: pages made from the code, links out of docs/, and other
toolkits' options.
"""

import json
import re
import sys
from types import SimpleNamespace

import pytest
from conftest import ROOT
from support import keys_page
from support.browser import CHROMIUM, browsing
from support.document_commands import Desk, snippets

from config import default_values
from settings.architectures import architectures
from tools.package import docs_site
from training.command_line import FLAGS

KNOWN = json.loads((ROOT / "tests" / "golden" / "other_options.json").read_text())


def text(name):
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


@pytest.mark.smoke
def test_the_page_of_keys_is_what_the_code_declares():
    page = keys_page.page()
    assert text("keys.md") == page, (
        "write it again: PYTHONPATH=.:tests python tests/support/keys_page.py"
    )
    rows = re.findall(r"^\| `([A-Z][\w.]+)` \|", page, re.M)
    assert set(rows) == set(default_values())
    assert len(re.findall("^### ", page, re.M)) == len(architectures())
    assert "| `SEED` | `0` |" in page


def test_every_page_is_in_the_sites_menu():
    menu = re.findall(
        r": ([\w/]+\.md)$", (ROOT / "tools/package/mkdocs.yml").read_text(encoding="utf-8"), re.M
    )
    pages = {str(file.relative_to(ROOT / "docs")) for file in (ROOT / "docs").rglob("*.md")}
    assert sorted(menu) == sorted(pages | set(docs_site.PAGES.values()))


@pytest.mark.parametrize(
    ("page", "link", "there"),
    [
        ("index.md", "[a](docs/models/weights.md#what-fits)", "[a](weights.md#what-fits)"),
        ("index.md", "[a [b]](docs/SECURITY.md), [c](LICENSE)", "[a [b]](SECURITY.md), c"),
        ("index.md", '<img src="docs/images/curves.png">', '<img src="images/curves.png">'),
        (
            "gpu.md",
            "![a](images/batch.png) [b](../README_cn.md)",
            "![a](images/batch.png) [b](README_cn.md)",
        ),
        (
            "api/models.md",
            "[a](../weights.md) [b](../../README.md)",
            "[a](../weights.md) [b](../index.md)",
        ),
        ("gpu.md", "[a](https://b.c/d) `[a](b)` [a](#b)", "[a](https://b.c/d) `[a](b)` [a](#b)"),
    ],
)
def test_a_link_leads_where_it_leads_in_the_repository(page, link, there):
    page = SimpleNamespace(file=SimpleNamespace(src_uri=page))
    assert docs_site.on_page_markdown(link, page, SimpleNamespace(repo_url=None), None) == there


@pytest.mark.parametrize(
    ("page", "text", "shown"),
    [
        ("gpu_cn.md", "第一行\n第二行", "第一行第二行"),
        ("gpu_cn.md", "- 第一行，\n  第二行\n- 第二项", "- 第一行，第二行\n- 第二项"),
        ("gpu_cn.md", "第一行 `code`\n第二行\nword", "第一行 `code`\n第二行\nword"),
        ("gpu_cn.md", "# 标题\n\n段落", "# 标题\n\n段落"),
        ("gpu_cn.md", "```\n第一行\n第二行\n```", "```\n第一行\n第二行\n```"),
        ("gpu.md", "第一行\n第二行", "第一行\n第二行"),
    ],
)
def test_a_line_break_between_chinese_characters_is_no_space(page, text, shown):
    page = SimpleNamespace(file=SimpleNamespace(src_uri=page))
    assert docs_site.on_page_markdown(text, page, SimpleNamespace(repo_url=None), None) == shown


@pytest.mark.parametrize(
    ("page", "language", "titles"),
    [("gpu.md", "en", ["Home", "中文"]), ("gpu_cn.md", "zh", ["首页", "GPU", "English"])],
)
def test_a_chinese_pages_menu_and_words_are_chinese(page, language, titles, monkeypatch):
    class Link(SimpleNamespace):
        def __init__(self, title, url):
            super().__init__(title=title, url=url)

    class Navigation(SimpleNamespace):
        def __init__(self, items, pages):
            super().__init__(items=items, pages=pages, homepage=None)

    monkeypatch.setitem(
        sys.modules, "mkdocs.structure.nav", SimpleNamespace(Link=Link, Navigation=Navigation)
    )
    chinese = SimpleNamespace(
        title="中文", children=[Link("首页", "README_cn.html"), Link("GPU", "gpu_cn.html")]
    )
    menu = Navigation([Link("Home", "index.html"), chinese], [])
    config = SimpleNamespace(theme={"language": "en"})
    page = SimpleNamespace(file=SimpleNamespace(src_uri=page))
    context = docs_site.on_page_context({"nav": menu}, page, config, menu)
    assert config.theme["language"] == language
    assert [item.title for item in context["nav"].items] == titles


@pytest.mark.skipif(not CHROMIUM, reason="needs Chromium")
def test_a_search_from_the_disk_finds_its_worker(tmp_path):
    """The theme searches in a Worker, which a browser doesn't start from the disk; the shim stands
    for it.
    """
    shim = (ROOT / "docs" / "iframe-worker.js").as_uri()
    (tmp_path / "part.js").write_text("self.part = 20;")
    (tmp_path / "worker.js").write_text(
        "addEventListener('message', async ({data}) => { await importScripts('part.js'); postMessage(data + part); });"
    )
    (tmp_path / "page.html").write_text(
        f"<body><script src='{shim}'></script><script>const worker = new Worker('worker.js');"
        "worker.addEventListener('message', ({data}) => { window.answer = data; }); worker.postMessage(1);</script>"
    )
    with browsing() as browser:
        browser.open((tmp_path / "page.html").as_uri())
        browser.wait("window.answer", seconds=10)
        assert browser.value("window.answer") == 21


def test_a_link_to_a_file_outside_docs_leads_to_the_repository_or_is_an_error():
    page = SimpleNamespace(file=SimpleNamespace(src_uri="gpu.md"))
    config = SimpleNamespace(repo_url="https://a.b/c/")
    found = docs_site.on_page_markdown("[a](../tests/support/ranks.py)", page, config, None)
    assert found == "[a](https://a.b/c/blob/main/tests/support/ranks.py)"
    with pytest.raises(
        FileNotFoundError, match=r"^docs/guides/gpu.md: ../tests/no.py isn't a file$"
    ):
        docs_site.on_page_markdown("[a](../tests/no.py)", page, config, None)


def test_other_toolkits_options_are_theirs_and_ours_are_ours():
    """golden/make_other_options.py read timm's and PaddleClas's own; test_documents.py asks for the
    keys.
    """
    page = text("timm.md")
    named = set(re.findall(r"`(--[\w-]+)`", page))
    assert len(named) > 120
    assert named <= set(KNOWN["timm"])
    for name in ("timm.md", "paddleclas.md"):
        assert {*re.findall(r"`-([a-z_]+)\b", text(name))} <= {*FLAGS, "p", "o", "cfg"}
    keys = re.findall(r"^\| `(\w+\.[\w.]+)`", text("paddleclas.md"), re.M)
    assert len(keys) > 35
    assert set(keys) <= set(KNOWN["paddleclas"])


def test_slurms_array_trains_a_seed_in_each_job(tmp_path):
    desk = Desk(tmp_path)
    (tmp_path / "seeds.sh").write_text(
        snippets("docs/guides/slurm.md", "bash")[0].replace(".venv/bin/python", "python")
    )
    small = "-cfg=vit_digits -batch_size=128 -o REPORT=False DATA.NUM_WORKERS=0 TRAIN.WARMUP_EPOCHS=0 TRAIN.NUM_EPOCHS=1"
    desk.type(f"SLURM_JOB_ID=7 SLURM_NTASKS=1 SLURM_ARRAY_TASK_ID=3 bash seeds.sh {small}")
    assert json.loads((tmp_path / "seeds/3/result.json").read_text())["config"]["SEED"] == 3
