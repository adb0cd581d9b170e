"""Reads the tables of a card."""

import itertools

from markdown_it import MarkdownIt


def table(text, first):
    """Returns the rows of the table whose first head is ``first``, as a reader sees the cells."""
    tables = []
    tokens = MarkdownIt().enable("table").parse(text)
    for token, inner in itertools.pairwise(tokens):
        if token.type == "table_open":
            tables.append([])
        elif token.type == "tr_open":
            tables[-1].append([])
        elif token.type in ("td_open", "th_open"):
            tables[-1][-1].append("".join(child.content for child in inner.children))
    [found] = [rows for rows in tables if rows[0][0] == first]
    return found[1:]
