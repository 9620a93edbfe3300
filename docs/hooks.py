"""What the site takes from outside its folder: CONTRIBUTING.md, the picture of the report, and the measured results.

Pages link to them as GitHub does, from ``docs/``; on the site they lie elsewhere, and the links are mended.
"""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
#: Where links lead on the site, by what they begin with in ``docs/``.
PLACES = {"](../CONTRIBUTING.md": "](contributing.md", "](../results/": "](evidence/", "](../examples/": "](examples/",
          "](../CHANGELOG.md": "](changelog.md"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    taken = {"contributing.md": ROOT / "CONTRIBUTING.md", "changelog.md": ROOT / "CHANGELOG.md"}
    taken |= {f"evidence/{path.relative_to(ROOT / 'results')}": path for kind in ("md", "png", "txt", "csv")
              for path in sorted((ROOT / "results").rglob(f"*.{kind}"))}
    taken |= {f"examples/{path.name}": path for path in sorted((ROOT / "examples").glob("*")) if path.is_file()}
    for name, path in taken.items():
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    for there, here in PLACES.items():
        markdown = markdown.replace(there, here)
    return markdown
