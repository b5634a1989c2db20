"""A hook of mkdocs: relative links that leave docs/ become links to the repository.

Pages link to files as they lie in the repository, where tests and editors can follow the links. The site is docs/ only.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Folders and files of docs/ that the site does not have.
NOT_PAGES = ("kubernetes", "grafana.json")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Return a page's Markdown with links out of docs/ replaced by links to the repository. mkdocs calls this for each
    page.
    """
    return with_repository_links(markdown, config.repo_url)


def with_repository_links(markdown: str, repository: str) -> str:
    """Return the Markdown with the target of each link out of docs/ replaced by its address under `repository`, branch
    main.
    """

    def replaced(match: re.Match[str]) -> str:
        path, mark, anchor = match[1].partition("#")
        if not path.startswith("../") and path not in NOT_PAGES:
            return match[0]
        target = (ROOT / "docs" / path).resolve()
        kind = "tree" if target.is_dir() else "blob"
        return f"]({repository}/{kind}/main/{target.relative_to(ROOT).as_posix()}{mark}{anchor})"

    return re.sub(r"\]\(([^)\s]+)\)", replaced, markdown)
