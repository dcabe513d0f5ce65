"""What mkdocs does to our pages beyond its settings: a hook, named in mkdocs.yml.

The pages are written for a checkout: their links lead to files outside docs/, and README.md is read first. In the site,
README.md is the home page, and a file that is no page (a test, a benchmark, an example) is copied as text.
"""

from __future__ import annotations

import posixpath
import re
import shutil
from pathlib import Path
from textwrap import indent

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / ".make" / "package"  # as it is installed: integrations/ is lwopt_backend.integrations
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "findings/README.md": "findings.md",
}
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)((?:#[^)\s]*)?)(?=\))")
CODE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


@event_priority(100)  # before mkdocstrings looks whether the folder is there
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    shutil.rmtree(PACKAGE, ignore_errors=True)
    for source, name in (("lwopt_backend", "lwopt_backend"), ("integrations", "lwopt_backend/integrations")):
        shutil.copytree(ROOT / source, PACKAGE / name, ignore=shutil.ignore_patterns("__pycache__"))
    # The one place of the project's address.
    address = re.search(r'^Source = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    config.repo_url = address[1] if address else None
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and the files outside docs/ that pages link to."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    linked = set()
    for file in files.documentation_pages():
        for target, _ in LINK.findall(CODE.sub("", file.content_string)):
            linked.add(place_of(target, file.src_uri))
    for place in sorted(filter(None, linked)):
        if place.startswith("source/"):
            source = place.removeprefix("source/").removesuffix(".txt")
            files.append(File.generated(config, place, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links lead to places in the site; a block's title is the name of the file that it shows."""
    here = page.file.src_uri
    if here == "index.md":
        page.meta["hide"] = ["navigation"]  # the column would show nothing but "Home"
    if here == "megatron_names.md":  # the names of tests are for those who have the checkout
        markdown = re.sub(r"^(\|.*) [^|]*\|$", r"\1", markdown, flags=re.MULTILINE)

    def relinked(match: re.Match[str]) -> str:
        place = place_of(match[1], here)
        return (posixpath.relpath(place, posixpath.dirname(here) or ".") if place else match[1]) + match[2]

    parts = CODE.split(markdown)
    parts[::2] = [LINK.sub(relinked, part) for part in parts[::2]]
    parts[1::2] = [titled(part) for part in parts[1::2]]
    return tabs("".join(parts)) if here == "index.md" else "".join(parts)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """A command in a sentence breaks at its spaces: browsers break a line behind any hyphen, as in ``--`` ``ranks``."""

    def whole(code: re.Match[str]) -> str:
        words = (f'<span class="word">{word}</span>' if "-" in word else word for word in code[1].split(" "))
        return f"<code>{' '.join(words)}</code>"

    return re.sub(r"<code>([^<]*-[^<]*)</code>", whole, html)


def tabs(page: str) -> str:
    """The home page with the engines of its first section side by side, a tab each."""
    before, heading, rest = page.partition("## What changes in your code\n")
    section, following, after = rest.partition("\n## ")
    first, *engines = re.split(r"^### (.*)\n", section, flags=re.MULTILINE)
    made = [f'=== "{name}"\n\n{indent(text.strip(), "    ")}\n' for name, text in zip(engines[::2], engines[1::2])]
    return before + heading + first + "\n".join(made) + following + after


def place_of(target: str, page: str) -> str | None:
    """Where the file that a page links to is in the site; None if there is no such file."""
    outside = {place: source for source, place in PAGES.items()}
    source = outside.get(page, f"docs/{page}")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    if path in PAGES:
        return PAGES[path]
    if not (ROOT / path).is_file():
        return None
    return path.removeprefix("docs/") if path.startswith("docs/") else f"source/{path}.txt"


def titled(block: str) -> str:
    first, _, rest = block.partition("\n")
    language, _, name = first.removeprefix("```").partition(" ")
    title = f' title="{name}"' if "." in name else ""
    return f"```{language}{title}\n{rest}"
