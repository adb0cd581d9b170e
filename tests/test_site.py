"""What mkdocs.yml makes a site of: pages made from the code, links out of docs/, and other
toolkits' options.
"""

import functools
import http.server
import json
import os
import re
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
from conftest import ROOT
from support import keys_page
from support.browser import CHROMIUM, browsing
from support.document_commands import Desk, snippets

from config import default_values
from models import list_models
from settings.architectures import architectures
from tools.package import docs_site, docs_tables
from training.command_line import FLAGS

KNOWN = json.loads((ROOT / "tests" / "golden" / "other_options.json").read_text())


def text(name):
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


@pytest.mark.smoke
def test_the_page_of_keys_is_what_the_code_declares():
    page = keys_page.page()
    assert text("reference/keys.md") == page, (
        "write it again: PYTHONPATH=.:tests python tests/support/keys_page.py"
    )
    rows = re.findall(r"^\| `([A-Z][\w.]+)` \|", page, re.M)
    assert set(rows) == set(default_values())
    assert len(re.findall("^### ", page, re.M)) == len(architectures())
    assert "| `SEED` | int, 0 or more | `0` |  | The random seed of" in page
    assert "| `AMP_EVAL` | bool | `False` | `AMP` True |" in page


def site(page, folder="docs", repo_url=None):
    """Returns MkDocs' page and configuration, as far as the hook reads them."""
    config = SimpleNamespace(docs_dir=ROOT / folder, repo_url=repo_url)
    return SimpleNamespace(file=SimpleNamespace(src_uri=page)), config


@pytest.mark.parametrize(("folder", "name"), [("docs", "mkdocs"), ("docs/zh", "mkdocs_zh")])
def test_every_page_is_in_its_sites_menu(folder, name):
    text = (ROOT / f"tools/package/{name}.yml").read_text(encoding="utf-8")
    menu = re.findall(r": ([\w/]+\.md)$", text, re.M)
    pages = {str(file.relative_to(ROOT / folder)) for file in (ROOT / folder).rglob("*.md")}
    pages = {page for page in pages if not page.startswith("zh/")}
    assert sorted(menu) == sorted(pages | set(docs_site.PAGES[folder].values()))


def test_a_comment_becomes_a_table():
    """A model is in the zoo and on one family's page, in both languages."""
    made = {}
    for page in ("docs/models/index.md", "docs/zh/models/index.md", "docs/models/swin.md"):
        markdown = (ROOT / page).read_text(encoding="utf-8")
        made[page] = docs_tables.filled(markdown, page, False)
        assert "generated" not in made[page]
    zoo = re.findall(r"^\| \[(\S+)\]\((\w+)\.md\) \|", made["docs/models/index.md"], re.M)
    assert [name for name, _ in zoo] == list_models()
    assert {page for _, page in zoo} <= {file.stem for file in docs_tables.MODELS.glob("*.md")}
    row = (
        "86.4 | 384 | 87.9 | 47.19 | `hf-hub:timm/swin_base_patch4_window12_384.ms_in22k_ft_in1k` |"
    )
    for page, name in zip(made, ("[{}](swin.md)", "[{}](swin.md)", "{}"), strict=True):
        assert f"| {name.format('swin_base_patch4_window12_384')} | {row}" in made[page]
    assert "| 模型 | acc1（%） | 图像尺寸 |" in made["docs/zh/models/index.md"]
    assert (
        "timm 1.0.31 has 21 names of this family; 21 are available." in made["docs/models/swin.md"]
    )
    note = "the recipe that fine-tunes weights of ImageNet-22k"
    assert note in made["docs/models/swin.md"]
    plain = docs_tables.filled("<!-- generated: family vit -->", "docs/models/vit.md", False)
    assert plain.startswith("*acc1* is top-1 on ImageNet-1k, as published for the weights")
    assert note not in plain
    linked = docs_tables.filled("<!-- generated: zoo -->", "docs/models/index.md", True)
    assert "[lenet](../../configs/lenet/lenet.yaml)" in linked


def test_the_evidences_tables_are_those_of_the_data():
    page = "docs/evidence/parity.md"
    made = docs_tables.filled((ROOT / page).read_text(encoding="utf-8"), page, False)
    assert "generated" not in made
    assert "| coat_lite_medium_384 | coat_lite_medium_384 | 44,571,048 | 5.4e-07 | 0.316 |" in made
    assert "| coat_mini | 6.805 | 6.815 | -0.16 % |" in made
    with pytest.raises(KeyError, match="nothing"):
        docs_tables.filled("<!-- generated: nothing -->", page, False)


@pytest.mark.parametrize("folder", ["models", "zh/models"])
def test_each_family_has_a_page(folder):
    """A page is about the same folders of configs/ in both languages."""
    found = {}
    for page in (ROOT / "docs" / folder).glob("*.md"):
        for marker in docs_tables.MARKER.findall(page.read_text(encoding="utf-8")):
            if marker.startswith("family "):
                found |= dict.fromkeys(marker.split()[1:], page.stem)
    assert found == docs_tables.pages()


@pytest.mark.parametrize(
    ("page", "link", "there"),
    [
        ("index.md", "[a](docs/models/weights.md#b)", "[a](models/weights.md#b)"),
        ("index.md", "[a [b]](docs/SECURITY.md), [c](LICENSE)", "[a [b]](SECURITY.md), c"),
        ("index.md", '<img src="docs/images/curves.png">', '<img src="images/curves.png">'),
        ("guides/gpu.md", "![a](../images/batch.png)", "![a](../images/batch.png)"),
        ("guides/gpu.md", "[a](../../README.md)", "[a](../index.md)"),
        ("api/models.md", "[a](../models/weights.md)", "[a](../models/weights.md)"),
        (
            "guides/gpu.md",
            "[a](https://b.c/d) `[a](b)` [a](#b)",
            "[a](https://b.c/d) `[a](b)` [a](#b)",
        ),
        # the other language's site
        ("index.md", "[中文](README_cn.md)", '<a href="zh/index.html">中文</a>'),
        (
            "guides/gpu.md",
            "[中文](../zh/guides/gpu.md)",
            '<a href="../zh/guides/gpu.html">中文</a>',
        ),
    ],
)
def test_a_link_leads_where_it_leads_in_the_repository(page, link, there):
    assert docs_site.on_page_markdown(link, *site(page), None) == there


@pytest.mark.parametrize(
    ("page", "link", "there"),
    [
        ("index.md", "[a](docs/zh/guides/gpu.md#b)", "[a](guides/gpu.md#b)"),
        ("index.md", "[English](README.md)", '<a href="../index.html">English</a>'),
        ("index.md", '<img src="docs/images/curves.png">', '<img src="../images/curves.png">'),
        (
            "guides/gpu.md",
            "[a](../../reference/keys.md#b)",
            '<a href="../../reference/keys.html#b">a</a>',
        ),
        ("guides/gpu.md", "[a](../../../README_cn.md)", "[a](../index.md)"),
        (
            "guides/gpu.md",
            "![a](../../images/batch.png)",
            '<img alt="a" src="../../images/batch.png">',
        ),
    ],
)
def test_a_chinese_pages_link_leads_where_it_leads_in_the_repository(page, link, there):
    assert docs_site.on_page_markdown(link, *site(page, "docs/zh"), None) == there


@pytest.mark.parametrize(
    ("folder", "text", "shown"),
    [
        ("docs/zh", "第一行\n第二行", "第一行第二行"),
        ("docs/zh", "- 第一行，\n  第二行\n- 第二项", "- 第一行，第二行\n- 第二项"),
        ("docs/zh", "第一行 `code`\n第二行\nword", "第一行 `code`\n第二行\nword"),
        ("docs/zh", "# 标题\n\n段落", "# 标题\n\n段落"),
        ("docs/zh", "```\n第一行\n第二行\n```", "```\n第一行\n第二行\n```"),
        ("docs", "第一行\n第二行", "第一行\n第二行"),
    ],
)
def test_a_line_break_between_chinese_characters_is_no_space(folder, text, shown):
    assert docs_site.on_page_markdown(text, *site("guides/gpu.md", folder), None) == shown


@pytest.mark.parametrize(
    ("html", "shown"),
    [
        ("<p>a-b -c</p>", "<p>a-b -c</p>"),
        (
            "<p><code>sh a-b.sh -cfg=x --explain</code></p>",
            '<p><code>sh a-b.sh <span class="flag">-c</span>fg=x <span class="flag">--e</span>xplain</code></p>',
        ),
        (
            "<p>a_b</p><td>a_b<code>c/d_e</code></td>",
            "<p>a_b</p><td>a_<wbr>b<code>c/<wbr>d_<wbr>e</code></td>",
        ),
    ],
)
def test_code_and_tables_break_where_a_reader_would_break_them(html, shown):
    assert docs_site.on_page_content(html, *site("guides/gpu.md"), None) == shown


def test_each_row_of_the_keys_has_an_anchor():
    row = "<tr>\n<td><code>{}</code></td>\n<td>int</td>\n<td>{}</td>\n</tr>"
    shared = row.format("DATA.FOLD", "A fold.")
    own = row.format("MODEL.DEPTH", "Blocks.")
    html = (
        f'<h2 id="data">DATA</h2><table>{shared}</table><h3 id="vit">vit</h3><table>{own}</table>'
    )
    shown, rows = docs_site._with_anchors(html)
    assert rows == [
        ("data.fold", "DATA.FOLD", "A fold."),
        ("vit.model.depth", "MODEL.DEPTH (vit)", "Blocks."),
    ]
    assert re.findall(r'<tr id="(.*?)">', shown) == ["data.fold", "vit.model.depth"]


@pytest.mark.parametrize(
    ("output", "wraps"),
    [
        ("acc1: 97.22\n...\n", True),
        ("  indented: 1\n", True),
        ("name  acc1\na     1\n", False),
        ("RUN/\n└── log.txt\n", False),
    ],
)
def test_output_wraps_unless_it_has_columns(output, wraps):
    block = f'<div class="language-text highlight"><pre><code>{output}</code></pre></div>'
    page, config = site("guides/gpu.md")
    # A second block is judged by itself.
    found = docs_site.on_page_content(block + block.replace(output, "a  b"), page, config, None)
    assert found.count("wraps") == wraps


def test_the_menus_lead_to_the_other_languages_pages():
    pytest.importorskip("mkdocs")
    reference = SimpleNamespace(title="参考", children=[])
    nav = SimpleNamespace(items=[reference])
    _, config = site("index.md", "docs/zh")
    docs_site.on_nav(nav, config, None)
    assert [item.title for item in nav.items] == ["参考", "English"]
    for link in reference.children:
        # An address from docs/zh.
        assert (ROOT / "docs/zh" / link.url).with_suffix(".md").resolve().is_file()
    assert len(reference.children) == len(docs_site.ENGLISH_REFERENCES) > 1


def test_a_missing_page_says_so_in_the_sites_language():
    for folder, shown in (("docs", "404 - Not found"), ("docs/zh", "404：页面不存在")):
        _, config = site("404.html", folder)
        html = docs_site.on_post_template("<h1>404 - Not found</h1>", "404.html", config)
        assert html == f"<h1>{shown}</h1>"


# What somebody types, and the page that has to be the first.
SEARCHES = {
    "index.html": {
        "SLURM": "guides/slurm.html",
        "resuming": "guides/resume.html",
        "LINEAR_SCALED_LR": "reference/keys.html",
        "TRAIN.LINEAR_SCALED_LR": "reference/keys.html",
        "DATA.DROP_LAST": "reference/keys.html",
    },
    "zh/index.html": {"多标签": "guides/multilabel.html", "断点续训": "guides/resume.html"},
}


@pytest.mark.long
@pytest.mark.skipif(not CHROMIUM, reason="needs Chromium")
def test_both_sites_can_be_searched_from_the_disk_and_over_http(tmp_path):
    pytest.importorskip("mkdocs")
    for name, folder in (("mkdocs", tmp_path), ("mkdocs_zh", tmp_path / "zh")):
        words = [sys.executable, "-m", "mkdocs", "build", "-q", "-d", str(folder)]
        words += ["-f", str(ROOT / "tools" / "package" / f"{name}.yml")]
        subprocess.run(words, check=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"})
    handler = functools.partial(QuietHandler, directory=tmp_path)
    with (
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server,
        browsing() as browser,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for base in (tmp_path.as_uri(), f"http://127.0.0.1:{server.server_port}"):
            for page, searches in SEARCHES.items():
                for query, first in searches.items():
                    assert found_first(browser, f"{base}/{page}", query).endswith(first)
        server.shutdown()
        assert browser.said == []


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format, *args):
        pass


def found_first(browser, address, query):
    browser.open(address)
    # The theme loads its search when the input gets the focus.
    browser.value(
        "(() => { const input = document.querySelector('[data-md-component=search-query]');"
        "document.querySelector('#__search').click();"
        f"input.focus(); input.value = {json.dumps(query)};"
        "window.typed = () => { for (const kind of ['focus', 'keyup', 'input'])"
        "input.dispatchEvent(new Event(kind, {bubbles: true})); }; })()"
    )
    browser.wait(
        "typed() || document.querySelector('.md-search-result__link') !== null", seconds=30
    )
    return browser.value("document.querySelector('.md-search-result__link').href.split('?')[0]")


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


@pytest.mark.skipif(not CHROMIUM, reason="needs Chromium")
@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_zoo_is_filtered_and_sorted(language, tmp_path):
    """By the script's own inputs; an empty cell comes last, however the column is sorted."""
    heads = "".join(f"<th>{head}</th>" for head in docs_tables.HEADS)
    rows = [
        ("swin_tiny", "81.4", "224", "28.3", "4.51", "hf-hub:timm/swin_tiny.ms_in1k", "="),
        ("vit_7b", "", "256", "6,716.0", "1,775.10", "", "vit_7b"),
        ("levit_128", "78.5 @240", "224", "9.2", "0.41", "hf-hub:timm/levit_128.fb_dist_in1k", "="),
    ]
    cells = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    script = (ROOT / "docs" / "zoo.js").as_uri()
    (tmp_path / "page.html").write_text(
        f"<!doctype html><html lang={language}><meta charset=utf-8><body><div class=zoo><table><thead><tr>{heads}</tr></thead>"
        f"<tbody>{cells}</tbody></table></div><script src='{script}'></script>"
    )
    shown = "[...document.querySelectorAll('tbody tr:not([hidden]) td:first-child')].map(c => c.textContent).join()"

    with browsing() as browser:

        def typed(index, value):
            browser.value(
                f"(() => {{ const input = document.querySelectorAll('input')[{index}]; input.value = '{value}';"
                " input.dispatchEvent(new Event('input')); return 1; })()"
            )
            return browser.value(shown)

        def clicked(column):
            browser.value(f"document.querySelectorAll('th button')[{column}].click(), 1")
            return browser.value(shown)

        browser.open((tmp_path / "page.html").as_uri())
        browser.wait("!!document.querySelector('output')", seconds=10)
        assert (
            browser.value("document.querySelector('output').value")
            == {
                "en": "3 models",
                "zh": "3 个模型",
            }[language]
        )
        assert typed(0, "TIMM levit") == "levit_128"
        assert typed(0, "") == "swin_tiny,vit_7b,levit_128"
        assert typed(1, "100") == "swin_tiny,levit_128"
        assert typed(2, "80") == "swin_tiny"
        typed(1, "")
        assert typed(2, "") == "swin_tiny,vit_7b,levit_128"
        assert clicked(1) == "swin_tiny,levit_128,vit_7b"
        assert clicked(1) == "levit_128,swin_tiny,vit_7b"
        assert clicked(3) == "levit_128,swin_tiny,vit_7b"
        assert clicked(3) == "vit_7b,swin_tiny,levit_128"
        assert clicked(0) == "levit_128,swin_tiny,vit_7b"


def test_a_link_to_a_file_outside_docs_leads_to_the_repository_or_is_an_error():
    page, config = site("guides/gpu.md", repo_url="https://a.b/c/")
    found = docs_site.on_page_markdown("[a](../../tests/support/ranks.py)", page, config, None)
    assert found == "[a](https://a.b/c/blob/main/tests/support/ranks.py)"
    message = r"^docs/guides/gpu.md: ../../tests/no.py isn't a file$"
    with pytest.raises(FileNotFoundError, match=message):
        docs_site.on_page_markdown("[a](../../tests/no.py)", page, config, None)


def test_other_toolkits_options_are_theirs_and_ours_are_ours():
    """golden/make_other_options.py read timm's and PaddleClas's own; test_documents.py asks for the
    keys.
    """
    page = text("migrate/timm.md")
    named = set(re.findall(r"`(--[\w-]+)`", page))
    assert len(named) > 120
    assert named <= set(KNOWN["timm"])
    for name in ("migrate/timm.md", "migrate/paddleclas.md"):
        assert {*re.findall(r"`-([a-z_]+)\b", text(name))} <= {*FLAGS, "p", "o", "cfg"}
    keys = re.findall(r"^\| `(\w+\.[\w.]+)`", text("migrate/paddleclas.md"), re.M)
    assert len(keys) > 35
    assert set(keys) <= set(KNOWN["paddleclas"])


def test_slurms_array_trains_a_seed_in_each_job(tmp_path):
    desk = Desk(tmp_path)
    (tmp_path / "seeds.sh").write_text(
        snippets("docs/guides/slurm.md", "bash")[1].replace(".venv/bin/python", "python")
    )
    small = "-cfg=vit_digits -batch_size=128 -o REPORT=False DATA.NUM_WORKERS=0 TRAIN.WARMUP_EPOCHS=0 TRAIN.NUM_EPOCHS=1"
    desk.type(f"SLURM_JOB_ID=7 SLURM_NTASKS=1 SLURM_ARRAY_TASK_ID=3 bash seeds.sh {small}")
    assert json.loads((tmp_path / "seeds/3/result.json").read_text())["config"]["SEED"] == 3
